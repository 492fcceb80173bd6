# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport numpy as cnp


# None for what has to be seen in another way.
cdef cnp.ndarray array_of_tensor(object value)
