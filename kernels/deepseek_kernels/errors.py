"""What the package raises besides `ValueError` for a wrong argument."""


class UnsupportedDevice(RuntimeError):
    """The Triton kernels were asked for on a device that they do not run on."""
