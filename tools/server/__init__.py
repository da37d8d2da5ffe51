# SPDX-License-Identifier: Apache-2.0
"""The parts of tools/serve.py, an OpenAI-compatible server over kvleaf-generate."""
