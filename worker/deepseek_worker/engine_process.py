"""The process that owns torch and the device: the engine's thread, and the one that feeds it."""

import logging
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deepseek_worker.config import EngineConfig
from deepseek_worker.grammar import GrammarCompiler
from deepseek_worker.processes import STOP_SECONDS, Launch, process_main
from deepseek_worker.startup import load_engine
from deepseek_worker.switchboard import Loaded, Switchboard
from deepseek_worker.tokenizer import Tokenizer, load_tokenizer

# By its name: the module runs as `__main__`.
logger = logging.getLogger("deepseek_worker.engine_process")


def main() -> None:
    """What `serve.py` starts."""
    process_main(run)


def run(launch: Launch, control: socket.socket) -> None:
    """Load the engine and serve API processes until the control closes.

    Raises:
        WorkerError: the engine could not be loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.info("Loading", extra={"model": str(launch.engine.model)})
    switchboard = Switchboard(lambda report: load(launch.engine, report), control)
    switchboard.run()
    if switchboard.engine.stats() is None:
        return
    # One that does not end, on a dead device, is left.
    stopper = threading.Thread(target=switchboard.engine.stop, daemon=True)
    stopper.start()
    stopper.join(STOP_SECONDS / 2)
    if stopper.is_alive():
        logger.warning("The engine does not end; leaving it")


def load(config: EngineConfig, report: Callable[[float], None]) -> Loaded:
    """The engine, and what follows grammars for its tokens."""
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        tokenizer = pool.submit(load_tokenizer, config.model)
        engine = load_engine(config, report)
        return engine, grammars(tokenizer.result(), engine.vocab_size)


def grammars(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler | None:
    """What follows grammars; None for a tokenizer that they cannot follow."""
    try:
        return GrammarCompiler(tokenizer, vocab_size)
    except Exception as error:
        logger.warning("No grammars for this tokenizer: %s", error)
        return None


if __name__ == "__main__":
    main()
