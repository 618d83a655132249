from lightning_wlb.cost.flops import ModelShape


def shape_of(c):
    heads = c.num_attention_heads
    return ModelShape(
        dim=c.hidden_size,
        layers=c.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        ffn_dim=c.intermediate_size,
        vocab_size=c.vocab_size,
    )
