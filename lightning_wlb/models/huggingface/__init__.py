"""Hugging Face decoders as models of this package: transformers' own modules on packed rows.

Needs the extra ``hf`` (transformers, safetensors, peft). Nothing outside of this folder imports
transformers, and this folder only where a Hugging Face model is asked for.

How a model of transformers becomes a pipeline stage that is trained, step by step:

1. **The config** (``config_and_shape``): a folder, a file, a hub name or fields become a config.
   The planner gets the sizes that it counts with from a model without memory that two tokens run
   through. ``module`` keeps both: ``HuggingFaceModule``, the LightningModule that a user makes.
2. **What cannot be exact is refused** (``families``): dropout, layers that do not attend, a
   family's own masks, quantised weights.
3. **The model is built without memory and taken apart** (``model_parts``): embedding, layers and
   head become the three parts of a ``Decoder``, and stand-ins take their places in the family's
   code. With ``lora`` peft puts its modules in before (``lora``).
4. **A stage runs the family's own forward** (``decoder``) on packed rows, through the stage's
   layers only. The parts of other stages are removed by the strategy, as from any ``Decoder``.
5. **Attention** (``attention``): the family's modules call ours by its name in the config. It finds
   the micro-batch of the running forward in a context variable, and calls the package's kernels.
6. **Tensor parallelism** (``tensor_parallel``): by the plan in the family's config parameters are
   sharded, and hooks gather rows in front of a block and reduce them behind it.
7. **Values** (``load_and_export``): each rank reads the part of a pretrained folder that it holds
   (``safetensors_folder``); without weights it draws values as a function of names
   (``model_parts``).
8. **Export** (``load_and_export``, by ``lightning-wlb export``): a checkpoint of any mesh becomes
   a folder for ``from_pretrained``, or a folder of adapters for peft.
"""
