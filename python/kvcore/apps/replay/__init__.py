# SPDX-License-Identifier: Apache-2.0
"""Drive the real cache manager with request traffic, in virtual time; see `kvcore.replay`."""
