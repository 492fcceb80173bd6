# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a manager to other processes: cache events, and a socket for cache resets."""
