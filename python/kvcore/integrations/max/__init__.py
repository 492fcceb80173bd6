# SPDX-License-Identifier: Apache-2.0
"""MAX's names: slots of a sequence each, views of a batch. Callers take them from `kvcore`."""
