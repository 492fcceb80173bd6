# SPDX-License-Identifier: Apache-2.0
from typing import final

@final
class Terms:
    """What a context says of its pages, as C++ takes it."""
