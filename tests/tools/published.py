"""Tiny published models: their names and shapes, weights by a formula, files, and a forward pass.

Stated by themselves, from the published layouts, with loops over heads and positions in float64.
"""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

D, H, KV, K, F, V, LAYERS = 32, 4, 2, 8, 48, 50, 2
LENGTH = 7
ATTENTION = {"q": (H * K, D), "k": (KV * K, D), "v": (KV * K, D)}
LLADA = {
    "wte.weight": (V, D),
    **{
        f"blocks.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            **dict(attn_norm=(D,), ff_norm=(D,), attn_out=(D, H * K)),
            **dict(q_proj=(H * K, D), k_proj=(H * K, D), v_proj=(H * K, D)),
            **dict(ff_proj=(F, D), up_proj=(F, D), ff_out=(D, F)),
        }.items()
    },
    "ln_f.weight": (D,),
    "ff_out.weight": (V, D),
}
BLOCK = {
    **{f"self_attn.{n}_proj.weight": shape for n, shape in ATTENTION.items()},
    "self_attn.o_proj.weight": (D, H * K),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
    "mlp.gate_proj.weight": (F, D),
    "mlp.up_proj.weight": (F, D),
    "mlp.down_proj.weight": (D, F),
}
BIASES = {f"self_attn.{n}_proj.bias": shape[:1] for n, shape in ATTENTION.items()}
SMDM_BLOCK = {
    "norm_1.weight": (D,),
    "attn.attn.weight": ((H + 2 * KV) * K, D),
    "attn.proj.weight": (D, H * K),
    "norm_2.weight": (D,),
    "mlp.swiglu.w1.weight": (F, D),
    "mlp.swiglu.w2.weight": (F, D),
    "mlp.swiglu.w3.weight": (D, F),
}


def qwen(extra, tied):
    block = BLOCK | extra
    shapes = {f"model.layers.{i}.{n}": s for i in range(LAYERS) for n, s in block.items()}
    shapes |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    return shapes | ({} if tied else {"lm_head.weight": (V, D)})


def mdlm(d=D, f=F, rows=V + 1, layers=LAYERS, c=128):
    """Names and shapes of MDLM, with all it has for time."""
    block = {"norm1.weight": (d,), "norm2.weight": (d,), "attn_qkv.weight": (3 * d, d)}
    block |= {"attn_out.weight": (d, d), "mlp.0.weight": (f, d), "mlp.0.bias": (f,)}
    block |= {"mlp.2.weight": (d, f), "mlp.2.bias": (d,)}
    block |= {"adaLN_modulation.weight": (6 * d, c), "adaLN_modulation.bias": (6 * d,)}
    names = {f"blocks.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    names |= {"vocab_embed.embedding": (rows, d), "output_layer.norm_final.weight": (d,)}
    names |= {"sigma_map.mlp.0.weight": (c, 256), "sigma_map.mlp.0.bias": (c,)}
    names |= {"sigma_map.mlp.2.weight": (c, c), "sigma_map.mlp.2.bias": (c,)}
    names |= {"output_layer.linear.weight": (rows, d), "output_layer.linear.bias": (rows,)}
    names |= {"output_layer.adaLN_modulation.weight": (2 * d, c)}
    names |= {"output_layer.adaLN_modulation.bias": (2 * d,)}
    return {f"backbone.{name}": shape for name, shape in names.items()}


SHAPES = {
    "llada": {f"model.transformer.{name}": shape for name, shape in LLADA.items()},
    "dream": qwen(BIASES, tied=False),
    "qwen3": qwen({f"self_attn.{n}_norm.weight": (K,) for n in "qk"}, tied=True),
    "smdm": {f"transformer.h.{i}.{n}": s for i in range(LAYERS) for n, s in SMDM_BLOCK.items()}
    | {"transformer.wte.weight": (V + 1, D), "transformer.ln_f.weight": (D,)}
    | {"lm_head.weight": (V, D)},
    "mdlm": mdlm(),
}
# What the model config needs to be each of them, beside the sizes.
MODEL = dict(num_layers=LAYERS, width=D, num_heads=H, mlp_dim=F, position="rope", qk_norm=False)
MODELS = {
    "llada": dict(mask_id=V - 1, table_size=V, rope_base=500_000.0),
    "dream": dict(mask_id=V - 1, table_size=V, num_kv_heads=KV, qkv_bias=True, shift=True)
    | dict(rope_base=1e6, norm_epsilon=1e-6),
    "qwen3": dict(mask_id=V - 1, table_size=V, num_kv_heads=KV, qk_norm=True, tied_head=True)
    | dict(rope_base=1e6, norm_epsilon=1e-6),
    "smdm": dict(mask_id=V, num_kv_heads=KV),
    "mdlm": dict(mask_id=V, norm="layer", mlp="gelu_tanh", head_bias=True),
}


def weights(shapes, dtype=np.float32):
    """Values sin(a k^1.5 + b) of flat index and name, around 1 for norms; a matrix of sin(a k + b)
    has rank 2 and hides mistakes."""
    found = {}
    for name, shape in shapes.items():
        size, seed = int(np.prod(shape)), zlib.crc32(name.encode())
        values = 0.3 * np.sin((0.7 + seed % 89 / 31) * np.arange(size) ** 1.5 + seed % 101)
        values += "norm" in name or "ln_f" in name
        found[name] = values.reshape(shape).astype(dtype)
    return found


def write_file(path: Path, arrays):
    """A safetensors file, byte by byte as its format says."""
    header, data = {}, b""
    for name, array in arrays.items():
        kind = "BF16" if array.dtype == ml_dtypes.bfloat16 else "F32"
        header[name] = dict(dtype=kind, shape=array.shape)
        header[name]["data_offsets"] = (len(data), len(data) + array.nbytes)
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def norm(x, gain, epsilon, centre=False):
    x = x - np.mean(x) if centre else x
    return x / np.sqrt(np.mean(x * x) + epsilon) * gain


def turned(x, position, base):
    """One head's vector, rotated; its first half pairs with its second."""
    out = np.empty(K)
    for i in range(K // 2):
        angle = position * base ** (-2 * i / K)
        a, b = x[i], x[i + K // 2]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + K // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(queries, keys, values):
    """(n, H, K), (n, kv, K), (n, kv, K) -> (n, H * K); a head reads the keys of its group."""
    n, share = len(queries), H // keys.shape[1]
    out = np.zeros((n, H, K))
    for i in range(n):
        for h in range(H):
            score = np.array([queries[i, h] @ keys[j, h // share] for j in range(n)]) / np.sqrt(K)
            chance = np.exp(score - score.max())
            out[i, h] = chance / chance.sum() @ values[:, h // share]
    return out.reshape(n, H * K)


def silu(x):
    return x / (1 + np.exp(-x))


def forward(name, arrays, tokens):
    """Logits (n, outputs) of one row by the published model `name`."""
    w = {key: np.asarray(value, np.float64) for key, value in arrays.items()}
    if name == "mdlm":
        return forward_dit(w, tokens)
    names = {  # of a block: its norms, projections, output, gate, up and down
        "llada": ("attn_norm", "{}_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out"),
        "smdm": ("norm_1", "", "attn.proj", "norm_2", *(f"mlp.swiglu.w{k}" for k in (1, 2, 3))),
    }
    own = ("input_layernorm", "self_attn.{}_proj", "self_attn.o_proj", "post_attention_layernorm")
    own += tuple(f"mlp.{k}_proj" for k in ("gate", "up", "down"))
    norm1, project, out, norm2, gate, up, down = names.get(name, own)
    table, block, last, head = {
        "llada": ("model.transformer.wte", "model.transformer.blocks", "model.transformer.ln_f")
        + ("model.transformer.ff_out",),
        "smdm": ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
    }.get(name, ("model.embed_tokens", "model.layers", "model.norm", "lm_head"))
    model, n = MODELS[name], len(tokens)
    base, epsilon = model.get("rope_base", 1e4), model.get("norm_epsilon", 1e-5)
    kv = model.get("num_kv_heads", H)

    def projected(layer, kind, x):
        """(heads, K) of a position: a published projection, sought in the fused one if need be."""
        number = H if kind == "q" else kv
        if name != "smdm":
            key = f"{block}.{layer}.{project.format(kind)}"
            y = w[f"{key}.weight"] @ x + w.get(f"{key}.bias", 0)
            y = y.reshape(number, K)
            gain = w.get(f"{block}.{layer}.self_attn.{kind}_norm.weight")
            return y if gain is None else np.array([norm(head, gain, epsilon) for head in y])
        fused, heads = w[f"{block}.{layer}.attn.attn.weight"] @ x, []
        for group in range(KV):  # rows of a group: its queries, a key, a value
            begin = group * (H // KV + 2)
            rows = {"q": range(H // KV), "k": [H // KV], "v": [H // KV + 1]}[kind]
            heads += [fused[(begin + r) * K : (begin + r + 1) * K] for r in rows]
        return np.array(heads)

    x = w[f"{table}.weight"][tokens]
    for layer in range(LAYERS):
        at = lambda key, layer=layer: w[f"{block}.{layer}.{key}.weight"]
        u = np.array([norm(row, at(norm1), epsilon) for row in x])
        q, k, v = (np.array([projected(layer, kind, row) for row in u]) for kind in "qkv")
        q, k = (
            np.array([[turned(head, i, base) for head in y[i]] for i in range(n)]) for y in (q, k)
        )
        x = x + attention(q, k, v) @ at(out).T
        for i in range(n):
            u = norm(x[i], at(norm2), epsilon)
            x[i] = x[i] + at(down) @ (silu(at(gate) @ u) * (at(up) @ u))
    x = np.array([norm(row, w[f"{last}.weight"], epsilon) for row in x])
    head = w.get(f"{head}.weight", w[f"{table}.weight"])
    logits = x @ head.T
    return np.concatenate([logits[:1], logits[:-1]]) if model.get("shift") else logits


def forward_dit(w, tokens):
    """MDLM with time, at sigma = 0."""
    w = {key.removeprefix("backbone."): value for key, value in w.items()}
    linear = lambda key, x: w[f"{key}.weight"] @ x + w.get(f"{key}.bias", 0)
    features = np.array([1.0] * 128 + [0.0] * 128)
    told = silu(linear("sigma_map.mlp.2", silu(linear("sigma_map.mlp.0", features))))
    modulated = lambda x, key, shift, scale: (
        norm(x, w[f"{key}.weight"], 1e-5, centre=True) * (1 + scale) + shift
    )
    x, n = w["vocab_embed.embedding"][tokens], len(tokens)
    for layer in range(LAYERS):
        b = f"blocks.{layer}."
        chunks = np.split(linear(f"{b}adaLN_modulation", told), 6)
        shift1, scale1, gate1, shift2, scale2, gate2 = chunks
        qkv = [linear(f"{b}attn_qkv", modulated(r, f"{b}norm1", shift1, scale1)) for r in x]
        q, k, v = np.moveaxis(np.array(qkv).reshape(n, 3, H, K), 1, 0)
        q, k = (
            np.array([[turned(head, i, 1e4) for head in y[i]] for i in range(n)]) for y in (q, k)
        )
        mixed = attention(q, k, v)
        for i in range(n):
            x[i] = x[i] + gate1 * linear(f"{b}attn_out", mixed[i])
            u = linear(f"{b}mlp.0", modulated(x[i], f"{b}norm2", shift2, scale2))
            u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
            x[i] = x[i] + gate2 * linear(f"{b}mlp.2", u)
    shift, scale = np.split(linear("output_layer.adaLN_modulation", told), 2)
    final = [modulated(row, "output_layer.norm_final", shift, scale) for row in x]
    return np.array([linear("output_layer.linear", row) for row in final])
