# SPDX-License-Identifier: Apache-2.0
"""The names of other systems: MAX's slots and views, JAX's functions over plain arrays.

Callers take them from ``kvcore`` and ``kvcore.functional``, which have all of them.
"""
