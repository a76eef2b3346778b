"""Header-only models from hyperparameters: the metadata and a plausible tensor table of an architecture family.

One table entry per family says which tensors a block has. Types are given per role, so that a file of a known size and
mixture can be approached; the data of every file is a hole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gguf_writer import SIZES, size_of, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

#: Roles a type can be given for; ``all`` is the default of every other one.
ROLES = ("all", "embedding", "attention", "ffn", "gate", "down", "shared", "output", "recurrent")

Table = list[tuple[str, str, tuple[int, ...]]]


class Shape:
    """A model under construction."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = {"heads": 1, "heads_kv": spec.get("heads", 1), "vocabulary": 32000, "trained": 131072, **spec}
        self.tensors: Table = []

    def __getattr__(self, name: str) -> Any:
        return self.spec.get(name, 0)

    def type_of(self, role: str) -> str:
        """Return the tensor type of a role."""
        types = self.spec.get("types", {})
        return types.get(role, types.get("all", "F16"))

    def add(self, name: str, role: str, *shape: int) -> None:
        """Add a tensor; norms and vectors are float32, and a type whose block does not divide the row gives way to Q8_0."""
        kind = self.type_of(role) if len(shape) > 1 and role != "plain" else "F32"
        if shape[0] % SIZES[kind][1]:
            kind = "Q8_0"
        self.tensors.append((name, self.spec.get("replace", {}).get(name, kind), shape))

    # -- parts of a block ----------------------------------------------------------------------------------------

    def plain_attention(self, at: str) -> None:
        """Queries, keys, values, output."""
        d, q = self.embedding, self.heads * self.head_k
        self.add(f"{at}attn_q.weight", "attention", d, q * (2 if self.gated else 1))
        self.add(f"{at}attn_k.weight", "attention", d, self.heads_kv * self.head_k)
        self.add(f"{at}attn_v.weight", "attention", d, self.heads_kv * self.head_v)
        self.add(f"{at}attn_output.weight", "attention", self.heads * self.head_v, d)
        if self.head_norms:
            self.add(f"{at}attn_q_norm.weight", "plain", self.head_k)
            self.add(f"{at}attn_k_norm.weight", "plain", self.head_k)

    def latent_attention(self, at: str) -> None:
        """Multi-head latent attention, with the joint and the split up-projections as converters write them."""
        d, rank, turned, low = self.embedding, self.kv_rank, self.turned, self.q_rank
        nope = self.head_k - turned
        self.add(f"{at}attn_q_a.weight", "attention", d, low)
        self.add(f"{at}attn_q_a_norm.weight", "plain", low)
        self.add(f"{at}attn_q_b.weight", "attention", low, self.heads * self.head_k)
        self.add(f"{at}attn_kv_a_mqa.weight", "attention", d, rank + turned)
        self.add(f"{at}attn_kv_a_norm.weight", "plain", rank)
        self.add(f"{at}attn_kv_b.weight", "attention", rank, self.heads * (nope + self.head_v))
        if self.split_up:
            self.add(f"{at}attn_k_b.weight", "attention", nope, rank, self.heads)
            self.add(f"{at}attn_v_b.weight", "attention", rank, self.head_v, self.heads)
        self.add(f"{at}attn_output.weight", "attention", self.heads * self.head_v, d)

    def delta_net(self, at: str) -> None:
        """A gated delta net."""
        d, inner, groups, state = self.embedding, self.inner, self.groups, self.state
        mixed = inner + 2 * groups * state
        self.add(f"{at}attn_qkv.weight", "recurrent", d, mixed)
        self.add(f"{at}attn_gate.weight", "recurrent", d, inner)
        self.add(f"{at}ssm_conv1d.weight", "plain", self.kernel, mixed)
        self.add(f"{at}ssm_dt.bias", "plain", self.rank_dt)
        self.add(f"{at}ssm_a", "plain", self.rank_dt)
        self.add(f"{at}ssm_beta.weight", "recurrent", d, self.rank_dt)
        self.add(f"{at}ssm_alpha.weight", "recurrent", d, self.rank_dt)
        self.add(f"{at}ssm_norm.weight", "plain", state)
        self.add(f"{at}ssm_out.weight", "recurrent", inner, d)

    def dense(self, at: str) -> None:
        """A gated feed-forward."""
        self.add(f"{at}ffn_gate.weight", "ffn", self.embedding, self.ff)
        self.add(f"{at}ffn_up.weight", "ffn", self.embedding, self.ff)
        self.add(f"{at}ffn_down.weight", "ffn", self.ff, self.embedding)

    def experts_of(self, at: str) -> None:
        """Router, experts, and the shared expert where there is one."""
        d, count, wide = self.embedding, self.experts, self.ff_expert
        self.add(f"{at}ffn_gate_inp.weight", "plain", d, count)
        if self.fused_gate:
            self.add(f"{at}ffn_gate_up_exps.weight", "gate", d, 2 * wide, count)
        else:
            self.add(f"{at}ffn_gate_exps.weight", "gate", d, wide, count)
            self.add(f"{at}ffn_up_exps.weight", "gate", d, wide, count)
        self.add(f"{at}ffn_down_exps.weight", "down", wide, d, count)
        if self.ff_shared:
            self.add(f"{at}ffn_gate_shexp.weight", "shared", d, self.ff_shared)
            self.add(f"{at}ffn_up_shexp.weight", "shared", d, self.ff_shared)
            self.add(f"{at}ffn_down_shexp.weight", "shared", self.ff_shared, d)

    def block(self, index: int) -> None:
        """One block."""
        at = f"blk.{index}."
        self.add(f"{at}attn_norm.weight", "plain", self.embedding)
        if self.wkv:
            for name in ("receptance", "key", "value", "output"):
                self.add(f"{at}time_mix_{name}.weight", "recurrent", self.embedding, self.embedding)
            self.add(f"{at}channel_mix_key.weight", "ffn", self.embedding, self.ff)
            self.add(f"{at}channel_mix_value.weight", "ffn", self.ff, self.embedding)
            return
        trunk = self.layers - self.next_token
        if self.interval and index < trunk and (index + 1) % self.interval:
            self.delta_net(at)
        elif self.kv_rank:
            self.latent_attention(at)
        else:
            self.plain_attention(at)
        norm = "post_attention_norm" if self.interval else "ffn_norm"
        self.add(f"{at}{norm}.weight", "plain", self.embedding)
        if self.experts and index >= self.dense_first:
            self.experts_of(at)
        else:
            self.dense(at)
        if index >= trunk:
            self.add(f"{at}nextn.eh_proj.weight", "attention", 2 * self.embedding, self.embedding)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                self.add(f"{at}nextn.{name}.weight", "plain", self.embedding)

    # -- the whole -----------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        keys = {
            "block_count": self.layers, "context_length": self.trained, "embedding_length": self.embedding,
            "feed_forward_length": self.ff, "attention.head_count": self.heads, "attention.head_count_kv": self.heads_kv,
            "attention.key_length": self.head_k, "attention.value_length": self.head_v, "vocab_size": self.vocabulary,
            "expert_count": self.experts, "expert_used_count": self.used, "expert_feed_forward_length": self.ff_expert,
            "expert_shared_count": 1 if self.ff_shared else 0, "leading_dense_block_count": self.dense_first,
            "attention.q_lora_rank": self.q_rank, "attention.kv_lora_rank": self.kv_rank, "rope.dimension_count": self.turned,
            "attention.sliding_window": self.window, "full_attention_interval": self.interval, "nextn_predict_layers": self.next_token,
            "ssm.conv_kernel": self.kernel, "ssm.state_size": self.state, "ssm.group_count": self.groups,
            "ssm.time_step_rank": self.rank_dt, "ssm.inner_size": self.inner, "wkv.head_size": self.wkv,
        }  # fmt: skip
        arch = self.architecture
        found: dict[str, Any] = {"general.architecture": arch, "general.name": self.spec.get("name", arch)}
        found |= {f"{arch}.{key}": value for key, value in keys.items() if value}
        found[f"{arch}.attention.layer_norm_epsilon" if self.layer_norm else f"{arch}.attention.layer_norm_rms_epsilon"] = 1e-6
        return found

    def build(self) -> tuple[dict[str, Any], Table]:
        """Return metadata and tensor table."""
        self.add("token_embd.weight", "embedding", self.embedding, self.vocabulary)
        for index in range(self.layers):
            self.block(index)
        self.add("output_norm.weight", "plain", self.embedding)
        if not self.tied:
            self.add("output.weight", "output", self.embedding, self.vocabulary)
        return self.metadata(), self.tensors


def write(folder: Path, name: str, spec: dict[str, Any], **options: Any) -> str:
    """Write the header of a shape and return its path; written once per folder."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        metadata, tensors = Shape(spec).build()
        write_gguf(path, {**metadata, **options.pop("extra", {})}, tensors, **options)
    return str(path)


def total_mib(spec: dict[str, Any]) -> float:
    """Return the size of all tensors in MiB."""
    return sum(size_of(t) for t in Shape(spec).build()[1]) / 2**20


def machine(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's mapping from ``{cards = [[name, kind, model, capability, total MiB, free MiB], ...], host = [total, free]}``."""
    mib = 2**20
    pools = [{"name": name, "total_bytes": int(total * mib), "free_bytes": int(free * mib)} for name, _, _, _, total, free in spec.get("cards", [])]
    total, free = spec.get("host", [524288, 500000])
    pools.append({"name": "host", "total_bytes": int(total * mib), "free_bytes": int(free * mib)})
    devices = [
        {"name": name, "kind": kind, "pool": name, "model": model, "integrated": False, **({"compute_capability": capability} if capability else {})}
        for name, kind, model, capability, _, _ in spec.get("cards", [])
    ]
    for device in devices:
        device.update(spec.get("device", {}))
    return {"name": spec.get("name", "a machine"), "pools": pools, "devices": devices, **spec.get("more", {})}
