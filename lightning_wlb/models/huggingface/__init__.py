"""Hugging Face decoders as models of this package: transformers' own modules on packed rows.

Needs the extra ``hf`` (transformers, safetensors, peft). Nothing outside of this folder imports
transformers, and this folder only where a Hugging Face model is asked for.

How a model of transformers becomes a pipeline stage that is trained, step by step: its config is
read and the sizes that are planned with (``config_and_shape``), what cannot be exact is refused
(``families``), the model is built without memory and taken apart (``model_parts``), with peft's
adapters (``lora``). A stage runs the family's own forward through its layers (``decoder``), which
calls this package's ``attention``, recurrences piece by piece (``recurrent``) and hooks around
blocks (``tensor_parallel``). Values come from a pretrained folder or are drawn, and go into one
(``load_and_export``, ``safetensors_folder``). What a user makes is ``HuggingFaceModule``.
"""
