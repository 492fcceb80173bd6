# SPDX-License-Identifier: Apache-2.0
"""Programs that use the public API: the command line, the replay of traffic, the demo."""
