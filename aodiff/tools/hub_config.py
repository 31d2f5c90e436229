"""What a published model says of itself in its JSON files, compared with the config it is read by.

Shapes tell most; these files tell what shapes do not: heads, rotary base, epsilon, the mask id and
whether logits are shifted.
"""

import json
from pathlib import Path

from aodiff.config import ConfigError
from aodiff.nn.mdm import MDMConfig

FAMILY_OF = {  # model_type of config.json, in lower case
    "llada": "llada",
    "dream": "qwen",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "a2d-qwen2": "qwen",
    "a2d-qwen3": "qwen",
    "mdlm": "mdlm",
}
SHIFTED = {"llada": False, "dream": True, "mdlm": False}  # whether logits are read one before
AGREE = {  # key of config.json -> attribute of MDMConfig
    "mask_token_id": "mask",
    "n_heads": "num_heads",
    "num_attention_heads": "num_heads",
    "n_kv_heads": "kv_heads",
    "num_key_value_heads": "kv_heads",
    "rope_theta": "rope_base",
    "rms_norm_eps": "norm_epsilon",
}


def read_json(path: Path) -> dict:
    """The object of a file, {} if there is none.

    Raises:
      ConfigError: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again")
    return found


def named_family(directory: Path) -> str | None:
    """The family that config.json names, None without the file or without model_type.

    Raises:
      ConfigError: an architecture that is not known.
    """
    kind = read_json(directory / "config.json").get("model_type")
    if kind is None:
        return None
    if str(kind).lower() not in FAMILY_OF:
        raise ConfigError(
            f"{directory}/config.json is of architecture {kind!r}, which is unknown; known are "
            f"{', '.join(FAMILY_OF)}"
        )
    return FAMILY_OF[str(kind).lower()]


def mask_of_tokenizer(directory: Path) -> int | None:
    """The id of the mask token that tokenizer_config.json names, if it names one with its id.

    Raises:
      ConfigError: its added tokens are no ids with what they are.
    """
    said = read_json(directory / "tokenizer_config.json")
    token = said.get("mask_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = said.get("added_tokens_decoder") or {}
    try:
        ids = [int(key) for key, value in added.items() if value.get("content") == token]
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"{directory}/tokenizer_config.json has an added_tokens_decoder that is no object of "
            "ids and their tokens; download it again"
        ) from error
    return ids[0] if token and ids else None


def check(directory: Path, cfg: MDMConfig, mask_is_given: bool) -> None:
    """Raises ConfigError unless the files and `cfg` agree, and somebody names the mask id."""
    said = read_json(directory / "config.json")
    values = {key: said[key] for key in AGREE if said.get(key) is not None}
    wrong = {k: v for k, v in values.items() if v != getattr(cfg, AGREE[k])}
    if wrong:
        listed = ", ".join(f"{k}={v} (here {getattr(cfg, AGREE[k])})" for k, v in wrong.items())
        raise ConfigError(
            f"{directory}/config.json has {listed}; set model.* of the config to its values"
        )
    kind = str(said.get("model_type")).lower()
    if cfg.shift != SHIFTED.get(kind, cfg.shift):
        raise ConfigError(
            f"{directory}/config.json is of {kind} and the config has model.shift={cfg.shift}; its "
            f"models have {SHIFTED[kind]}"
        )
    if kind == "mdlm" and said.get("time_conditioning"):
        raise ConfigError(
            f"{directory}/config.json has time_conditioning={said['time_conditioning']}; only "
            "models that are told of no time can be read"
        )
    mask = mask_of_tokenizer(directory)
    if mask is not None and mask != cfg.mask:
        raise ConfigError(
            f"{directory}/tokenizer_config.json has mask id {mask} and the config {cfg.mask}; use "
            "the config and the tokenizer of the same model"
        )
    if mask is None and "mask_token_id" not in values and not mask_is_given:
        raise ConfigError(
            f"neither {directory} nor the config names the mask id, which is never guessed; set "
            "--config.model.mask_id"
        )
