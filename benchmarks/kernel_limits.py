"""What limits the rows that have missed their bars, and what was tried: the rows' notes."""

FIXED = (
    "some 10 us of a call do not depend on its size: 2 until the first keys are asked for, 4 in "
    "which equal shares end one after another, 3 until a second kernel has added the parts"
)

LIMITS = {
    "MLA decode bf16 64 x 8k, 16 heads": (
        "one tile of 74 KB loads while one is multiplied, by mma.sync with the queries in 144 "
        "registers; smaller tiles and two programs were slower, and so were tokens and latent "
        "columns as the rows of wgmma (0.49 to 0.57)"
    ),
    "gelu(LN(x) W + b) 4096 to 16384 M=512": (
        "the statistics are a kernel of some 2.5 us before the product; beside it they slowed it"
    ),
    "gelu(LN(x) W + b) 4096 to 4096 M=8192": (
        "the statistics read the input once more, 16 us, and the GeLU of a tile waits for its "
        "product; statistics in the product were slower (465 us), and so they were in few "
        "programs beside its start (393 us where it took 384)"
    ),
    "paged decode bf16 32 x 1.2k, 28/4 heads": (
        f"{FIXED}; a plain sum of as many bytes took 21.4 us. 1 to 6 programs a multiprocessor, "
        "16 to 128 tokens, 2 to 6 stages, adding in the same kernel, shares of equal tiles, and "
        "first keys fetched into L2 while the call before ends took 28.1 to 34.6 us, and one "
        "program for each head of a sequence 26.1 to 33"
    ),
    "paged decode bf16 8 x 16k, 28/4 heads": (
        f"{FIXED}; 0.904 where copies reached 4,124 GB/s. Deeper pipelines, more programs "
        "than run at once, L2 prefetch and adding in the same kernel were slower"
    ),
    "paged decode fp8 8 x 32k, 28/4 heads": (
        "0.6001; the bf16 time that it is measured by fell, nearly the same code had 0.589"
    ),
    "sampling top-p 0.95, batch 1": (
        "five dependent kernels of 2 to 6 us; 8 pivots or one level overflow the list, and one "
        "kernel whose programs wait for each other four times took 21.7 us"
    ),
}
