# SPDX-License-Identifier: Apache-2.0
from typing import final

@final
class Prompt:
    """Tokens with the extra keys that start in them, as the library takes them."""
