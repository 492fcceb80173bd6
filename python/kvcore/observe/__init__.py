# SPDX-License-Identifier: Apache-2.0
"""How other processes follow a manager: cache events, and the socket that resets its cache."""
