# SPDX-License-Identifier: Apache-2.0
"""Where pages lie and who works on them: one backend for each kind of device.

``protocol`` says what a backend does, ``host`` is numpy's memory, ``cuda`` NVIDIA's GPUs;
``selection`` picks one by a device or by the arrays of a call. Another kind of device is a module
of this package that has the name of the kind and a ``BACKEND``, and an entry of DLPACK_TYPES.
"""
