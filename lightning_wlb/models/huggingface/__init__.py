"""Hugging Face decoders as models of this package: transformers' own modules on packed rows.

Needs the extra ``hf`` (transformers, safetensors, peft). Nothing outside of this folder imports
transformers, and this folder only where a Hugging Face model is asked for.
"""
