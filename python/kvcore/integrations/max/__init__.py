# SPDX-License-Identifier: Apache-2.0
"""Classes with MAX's names: one slot per sequence, views of a batch. Import them from `kvcore`."""
