"""The Metal backend: sealing and decode attention as kernels of our own."""
