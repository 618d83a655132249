"""Hugging Face decoders as models of this package: transformers' own modules on packed rows.

The folder needs the extra ``hf`` (transformers, safetensors, peft). Nothing outside this folder
imports transformers, and the folder does so only when a Hugging Face model is used.

A model of transformers becomes a trained pipeline stage in these steps. Its config is read, and the
sizes for planning are found (``config_and_shape``). Models that cannot be trained exactly are
refused (``families``). The model is built without memory and taken apart (``model_parts``), with
peft's adapters (``lora``). A stage runs the family's own forward through its layers (``decoder``),
which calls this package's ``attention``, recurrences piece by piece (``recurrent``) and hooks
around blocks (``tensor_parallel``). Values are read from a pretrained folder or drawn, and exported
to a folder (``load_and_export``, ``safetensors_folder``). Users create a ``HuggingFaceModule``.
"""
