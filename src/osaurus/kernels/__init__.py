"""One operation a file: a plain torch reference, the fast path, and the one that chooses.

Kernels know tensors and nothing of requests. Every kernel's row result depends on that row
alone, never on how many rows run beside it (design, decision 6).
"""
