"""Native kernels for CPUs on numpy arrays; optional, built when installing with a C compiler."""
