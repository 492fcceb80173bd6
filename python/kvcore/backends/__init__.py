# SPDX-License-Identifier: Apache-2.0
"""Backends: the memory and the kernels of each kind of device.

``protocol`` defines a backend, ``host`` implements it for numpy arrays, ``cuda`` for NVIDIA GPUs.
``selection`` chooses the backend of a device or of a call's arrays. To add a kind of device, add a
module to this package with the name of the kind and a ``BACKEND``, and an entry to DLPACK_TYPES.
"""
