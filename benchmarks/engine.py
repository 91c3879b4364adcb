"""Speed of the engine: on one NVIDIA GPU, or with `--cpu` on this machine's processors.

`python benchmarks/engine.py --help` and `python benchmarks/engine.py --cpu --help` list the options
of each; `engine_gpu.py` and `engine_cpu.py` say what they measure.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# This folder last: its operator.py is not the standard library's.
sys.path = [path for path in sys.path if path != str(ROOT / "benchmarks")]
sys.path.append(str(ROOT / "benchmarks"))


def main() -> int:
    """Measure, write and print; 1 when a bar is missed."""
    arguments = sys.argv[1:]
    if "--cpu" in arguments:
        import engine_cpu  # noqa: PLC0415 - it needs transformers, which the other does not

        arguments.remove("--cpu")
        return engine_cpu.main(arguments)
    import engine_gpu  # noqa: PLC0415 - it needs Triton and a GPU, which the other does not

    return engine_gpu.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
