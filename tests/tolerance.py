"""Every tolerance of the test suite, with the reason for its size. None is widened to make a test pass."""

F64_GRADIENT = 1e-12  # float64 chunked against full attention: rounding of a few thousand terms, 2**-52 each
F32_GRADIENT = 1e-5  # the same in float32
