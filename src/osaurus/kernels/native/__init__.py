"""Native kernels: an optional compiled library, loaded with ctypes, which frees the interpreter
lock while it computes. Without it the torch forms run. OSAURUS_NATIVE=0 switches it off.
"""
