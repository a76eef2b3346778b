"""Every command-line flag of the llama.cpp programs that moves bytes, and the names of those that do not.

Source: ``common/arg.cpp`` of llama.cpp 0.5.0 (0c1e570) and the ``--help`` of build 10434; flags of
ik_llama.cpp from its README. Versions are normalised (see ``version.py``): build N is ``0.0.N``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal[
    "int",  # whole number
    "layers",  # whole number, "auto" or "all"
    "text",
    "path",
    "flag",  # no value
    "switch",  # no value, has negative names
    "onoff",  # value on/off/auto; a bare flag means on (older versions)
    "list",  # comma separated, repeated flags append
    "files",  # paths, comma separated, quoted as in CSV; repeated flags append
    "scaled",  # PATH:SCALE, likewise; before 0.5.0 also PATH SCALE
    "metadata",  # KEY=TYPE:VALUE, likewise
    "ratios",  # numbers separated by , or /
    "devices",  # comma separated device names, or none
    "overrides",  # pattern=target,...
    "choice",
    "sizes",  # MiB numbers, comma separated
]

SERVER = ("llama-server", "llama-cli")
IK = ("ik_llama.cpp",)
#: Words that --flag=VALUE and LLAMA_ARG_* take for yes and no.
TRUE = ("on", "enabled", "true", "1")
FALSE = ("off", "disabled", "false", "0")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with all its names."""

    target: str  # knob ("context.length"), or "option:NAME"
    names: tuple[str, ...]
    kind: Kind
    env: str | None = None  # without the LLAMA_ARG_ prefix unless it has another one
    negative: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None  # exclusive; ``instead`` says what replaced it
    instead: str = ""
    programs: tuple[str, ...] = ()  # empty: all
    forks: tuple[str, ...] = ()  # only these forks know it
    meaning: tuple[tuple[str, str], ...] = ()  # values in the knob's own words


def _f(target: str, names: str, kind: Kind, env: str | None = None, **more: object) -> Flag:
    return Flag(target, tuple(names.split()), kind, env, **more)  # type: ignore[arg-type]


# fmt: off
FLAGS: tuple[Flag, ...] = (
    _f("model.path", "-m --model", "path", "MODEL"),
    _f("option:hf-repo", "-hf -hfr --hf-repo", "text", "HF_REPO"),
    _f("option:hf-file", "-hff --hf-file", "text", "HF_FILE"),
    _f("option:model-url", "-mu --model-url", "text", "MODEL_URL"),
    _f("option:docker-repo", "-dr --docker-repo", "text", "DOCKER_REPO"),
    _f("context.length", "-c --ctx-size", "int", "CTX_SIZE"),
    _f("option:kv-unified-per-slot", "--kv-unified-per-slot", "int", "KV_UNIFIED_PER_SLOT", since="0.5.0", programs=("llama-server",)),
    _f("context.sequences", "-np --parallel", "int", "N_PARALLEL"),
    _f("context.unified", "-kvu --kv-unified", "switch", "KV_UNIFIED", negative=("-no-kvu", "--no-kv-unified")),
    _f("context.batch", "-b --batch-size", "int", "BATCH"),
    _f("context.micro_batch", "-ub --ubatch-size", "int", "UBATCH"),
    _f("context.flash_attention", "-fa --flash-attn", "onoff", "FLASH_ATTN"),
    _f("context.full_window", "--swa-full", "flag", "SWA_FULL"),
    _f("kv.key_type", "-ctk --cache-type-k", "choice", "CACHE_TYPE_K", choices=(*KV_TYPES, "q6_0"), forks=IK),
    _f("kv.value_type", "-ctv --cache-type-v", "choice", "CACHE_TYPE_V", choices=(*KV_TYPES, "q6_0"), forks=IK),
    _f("kv.key_type", "-ctk --cache-type-k", "choice", "CACHE_TYPE_K", choices=KV_TYPES),
    _f("kv.value_type", "-ctv --cache-type-v", "choice", "CACHE_TYPE_V", choices=KV_TYPES),
    _f("kv.on_device", "-kvo --kv-offload", "switch", "KV_OFFLOAD", negative=("-nkvo", "--no-kv-offload")),
    _f("layers.on_device", "-ngl --gpu-layers --n-gpu-layers", "layers", "N_GPU_LAYERS"),
    _f("layers.split", "-sm --split-mode", "choice", choices=("none", "layer", "row", "attn", "graph"), forks=IK, meaning=(("attn", "tensor"), ("graph", "tensor"))),
    _f("layers.split", "-sm --split-mode", "choice", "SPLIT_MODE", choices=("none", "layer", "row", "tensor")),
    _f("layers.ratio", "-ts --tensor-split", "ratios", "TENSOR_SPLIT"),
    _f("device.main", "-mg --main-gpu", "int", "MAIN_GPU"),
    _f("device.ids", "-dev --device", "devices", "DEVICE"),
    _f("option:rpc", "--rpc", "list", "RPC"),
    _f("layers.overrides", "-ot --override-tensor", "overrides", "OVERRIDE_TENSOR"),
    _f("option:cpu-moe", "-cmoe --cpu-moe", "flag", "CPU_MOE"),
    _f("experts.on_host", "-ncmoe --n-cpu-moe", "int", "N_CPU_MOE"),
    _f("option:n-cpu-ffn", "-ncffn --n-cpu-ffn", "int", "N_CPU_FFN", since="0.5.0"),
    _f("memory.load", "-lm --load-mode", "choice", "LOAD_MODE", choices=("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")),
    _f("option:mmap", "--mmap", "switch", "MMAP", negative=("--no-mmap", "-nommap"), until="0.5.0", instead="--load-mode"),
    _f("option:mlock", "--mlock", "flag", "MLOCK", until="0.5.0", instead="--load-mode mlock"),
    _f("option:direct-io", "-dio --direct-io", "switch", "DIO", negative=("-ndio", "--no-direct-io"), until="0.5.0", instead="--load-mode dio"),
    _f("option:lazy-mode", "-lzm --lazy-mode", "choice", "LAZY_MODE", choices=("on", "auto", "off"), since="0.5.0"),
    _f("option:repack", "--repack", "switch", "REPACK", negative=("-nr", "--no-repack")),
    _f("option:no-host", "--no-host", "flag", "NO_HOST"),
    _f("option:op-offload", "--op-offload", "switch", None, negative=("--no-op-offload",)),
    _f("option:numa", "--numa", "choice", "NUMA", choices=("distribute", "isolate", "numactl")),
    _f("option:fit", "-fit --fit", "onoff", "FIT", choices=("on", "off")),
    _f("option:fit-target", "-fitt --fit-target", "sizes", "FIT_TARGET"),
    _f("option:fit-ctx", "-fitc --fit-ctx", "int", "FIT_CTX"),
    _f("option:fit-print", "-fitp --fit-print", "onoff", "FIT_ESTIMATE", choices=("on", "off"), programs=("llama-fit-params",)),
    _f("option:override-kv", "--override-kv", "metadata"),
    _f("model.adapters", "--lora", "files"),
    _f("model.adapters", "--lora-scaled", "scaled"),
    _f("model.adapters", "--control-vector", "files"),
    _f("model.adapters", "--control-vector-scaled", "scaled"),
    _f("option:embedding", "--embedding --embeddings", "flag", "EMBEDDINGS"),
    _f("option:rerank", "--rerank --reranking", "flag", "RERANKING"),
    _f("option:pooling", "--pooling", "choice", "POOLING", choices=("none", "mean", "cls", "last", "rank")),
    _f("option:backend-sampling", "-bs --backend-sampling", "flag", "BACKEND_SAMPLING"),
    _f("model.mmproj", "-mm --mmproj", "path", "MMPROJ"),
    _f("option:mmproj-url", "-mmu --mmproj-url", "text", "MMPROJ_URL"),
    _f("option:mmproj-auto", "--mmproj-auto", "switch", "MMPROJ_AUTO", negative=("--no-mmproj", "--no-mmproj-auto")),
    _f("option:mmproj-offload", "--mmproj-offload", "switch", "MMPROJ_OFFLOAD", negative=("--no-mmproj-offload",)),
    _f("vision.device", "-mmdev --mmproj-device", "text", "MTMD_BACKEND_DEVICE", since="0.5.0"),
    _f("option:image-min-tokens", "--image-min-tokens", "int", "IMAGE_MIN_TOKENS"),
    _f("vision.max_tokens", "--image-max-tokens", "int", "IMAGE_MAX_TOKENS"),
    _f("option:mtmd-batch-max-tokens", "--mtmd-batch-max-tokens", "int", "MTMD_BATCH_MAX_TOKENS"),
    _f("option:warmup", "--warmup", "switch", None, negative=("--no-warmup",)),
    _f("speculation.kind", "--spec-type", "text", "SPEC_TYPE"),
    _f("model.draft", "-md --model-draft --spec-draft-model", "path", "SPEC_DRAFT_MODEL"),
    _f("option:spec-draft-hf", "-hfd -hfrd --hf-repo-draft --spec-draft-hf", "text", "SPEC_DRAFT_HF_REPO"),
    _f("option:spec-draft-ngl", "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", "layers", "N_GPU_LAYERS_DRAFT"),
    _f("option:spec-draft-device", "-devd --device-draft --spec-draft-device", "devices"),
    _f("option:spec-draft-type-k", "-ctkd --cache-type-k-draft --spec-draft-type-k", "choice", "SPEC_DRAFT_CACHE_TYPE_K", choices=KV_TYPES),
    _f("option:spec-draft-type-v", "-ctvd --cache-type-v-draft --spec-draft-type-v", "choice", "SPEC_DRAFT_CACHE_TYPE_V", choices=KV_TYPES),
    _f("option:spec-draft-override-tensor", "-otd --override-tensor-draft --spec-draft-override-tensor", "overrides"),
    _f("option:spec-draft-cpu-moe", "-cmoed --cpu-moe-draft --spec-draft-cpu-moe", "flag", "SPEC_DRAFT_CPU_MOE"),
    _f("option:spec-draft-n-cpu-moe", "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe", "int", "SPEC_DRAFT_N_CPU_MOE"),
    _f("speculation.window", "--spec-draft-n-max", "int", "SPEC_DRAFT_N_MAX"),
    _f("option:spec-draft-n-min", "--spec-draft-n-min", "int", "SPEC_DRAFT_N_MIN"),
    _f("option:spec-draft-backend-sampling", "--spec-draft-backend-sampling", "switch", "SPEC_DRAFT_BACKEND_SAMPLING", negative=("--no-spec-draft-backend-sampling",)),
    _f("speculation.window", "--draft --draft-n --draft-max", "int", "DRAFT_MAX", until="0.0.10092", instead="--spec-draft-n-max"),
    _f("option:spec-draft-n-min", "--draft-min --draft-n-min", "int", "DRAFT_MIN", until="0.0.10092", instead="--spec-draft-n-min"),
    _f("option:cache-ram", "-cram --cache-ram", "int", "CACHE_RAM", programs=SERVER),
    _f("option:ctx-checkpoints", "-ctxcp --ctx-checkpoints --swa-checkpoints", "int", "CTX_CHECKPOINTS", programs=SERVER),
    _f("option:checkpoint-min-step", "-cms --checkpoint-min-step", "int", "CHECKPOINT_MIN_SPACING_NT", programs=SERVER),
    _f("option:cache-idle-slots", "--cache-idle-slots", "switch", "CACHE_IDLE_SLOTS", negative=("--no-cache-idle-slots",)),
    _f("option:models-dir", "--models-dir", "path", "MODELS_DIR", programs=("llama-server",)),
    _f("option:models-preset", "--models-preset", "path", "MODELS_PRESET", programs=("llama-server",)),
    _f("option:models-max", "--models-max", "int", "MODELS_MAX", programs=("llama-server",)),
    _f("option:models-autoload", "--models-autoload", "switch", "MODELS_AUTOLOAD", negative=("--no-models-autoload",), programs=("llama-server",)),
    _f("option:sleep-idle-seconds", "--sleep-idle-seconds", "int", None, programs=("llama-server",)),
    _f("option:mla", "-mla --mla-use", "int", forks=IK),
    _f("option:attn-max-batch", "-amb --attention-max-batch", "int", forks=IK),
    _f("option:fused-moe", "-fmoe --fused-moe", "onoff", forks=IK),
    _f("option:run-time-repack", "-rtr --run-time-repack", "flag", forks=IK),
    _f("option:smart-expert-reduction", "-ser --smart-expert-reduction", "text", forks=IK),
    _f("option:graph-reuse", "-gr --graph-reuse", "flag", forks=IK),
    _f("option:merge-qkv", "-mqkv --merge-qkv", "flag", forks=IK),
    _f("option:muge", "-muge --merge-up-gate-experts", "flag", forks=IK),
    _f("option:cuda-params", "-cuda --cuda-params", "text", forks=IK),
    _f("option:split-mode-graph-max", "-smgs --split-mode-graph-scheduling", "flag", forks=IK),
    _f("option:no-offload-only-active-experts", "-no-ooae --no-offload-only-active-experts", "flag", forks=IK),
    _f("option:k-cache-hadamard", "-khad --k-cache-hadamard", "flag", forks=IK),
    _f("option:no-fused-up-gate", "-no-fug --no-fused-up-gate", "flag", forks=IK),
    _f("option:max-gpu", "-mgpu --max-gpu", "int", forks=IK),
    _f("option:offload-policy", "-op --offload-policy", "text", forks=IK),
    _f("option:grouped-expert-routing", "-ger --grouped-expert-routing", "flag", forks=IK),
    _f("option:no-fused-mul-multiadd", "-no-mmad --no-fused-mul-multiadd", "flag", forks=IK),
    _f("option:no-graph-reuse", "-no-gr --no-graph-reuse", "flag", forks=IK),
    _f("option:split-mode-f16", "-smf16 --split-mode-f16", "flag", forks=IK),
    _f("option:split-mode-f32", "-smf32 --split-mode-f32", "flag", forks=IK),
    _f("option:graph-reduce-type", "-grt --graph-reduce-type", "text", forks=IK),
    _f("option:scheduler-async", "-sas --scheduler-async", "flag", forks=IK),
    _f("option:validate-quants", "-vq --validate-quants", "flag", forks=IK),
    _f("option:offload-only-active-experts", "-ooae --offload-only-active-experts", "flag", forks=IK),
    _f("option:draft-params", "-draft --draft-params", "text", forks=IK),
    _f("option:ctx-size-draft", "-cd --ctx-size-draft", "int", forks=IK),
    _f("option:p-split", "-ps --p-split", "text", forks=IK),
    _f("option:cache-ram-similarity", "-crs --cache-ram-similarity", "text", forks=IK),
    _f("option:cache-ram-n-min", "-cram-n-min --cache-ram-n-min", "int", forks=IK),
    _f("option:reasoning-tokens", "--reasoning-tokens", "text", forks=IK),
    _f("option:max-extra-alloc", "--max-extra-alloc", "int", forks=IK),
    _f("option:dump-kv-cache", "-dkvc", "flag", forks=IK),
    _f("option:no-flash-attn", "-no-fa --no-flash-attn", "flag", forks=IK),
    _f("option:no-fused-moe", "-no-fmoe --no-fused-moe", "flag", forks=IK),
    _f("option:sched-max-copies", "", "int"),  # how the engine was built, not a flag: GGML_SCHED_MAX_COPIES
    _f("option:dry-run", "--dry-run", "flag", forks=IK),
)

#: Flags without bearing on memory: accepted silently. name: number of values.
_NO_VALUE = """
-h --help --usage --version -cl --cache-list --completion-bash --perf --no-perf -e --escape --no-escape --list-devices
--check-tensors --log-disable -v --verbose --log-verbose --offline --log-prefix --no-log-prefix --log-timestamps
--no-log-timestamps --ignore-eos --context-shift --no-context-shift -sp --special --spm-infill -cb --cont-batching -nocb
--no-cont-batching --reuse-port --cors-credentials --no-cors-credentials --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy
--no-webui-mcp-proxy -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui --cache-prompt --no-cache-prompt
--metrics --props --slots --no-slots --jinja --no-jinja --reasoning-preserve --no-reasoning-preserve
--skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant --lora-init-without-apply --spec-default
-cnv --conversation -no-cnv --no-conversation -st --single-turn -i --interactive --simple-io -mli
--multiline-input --no-display-prompt --display-prompt -no-display-prompt --show-timings --no-show-timings --prompt-cache-all
--prompt-cache-ro -if --interactive-first --in-prefix-bos --no-ppl --log-jsonl --verbose-prompt --dump-kv-cache
"""
_ONE_VALUE = """
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch
--cpu-strict-batch --prio-batch --poll-batch -n --predict --n-predict --keep --rope-scaling --rope-scale --rope-freq-base
--rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -dt --defrag-thold
-hft --hf-token --log-file --log-colors -lv --verbosity --log-verbosity --samplers -s --seed --sampler-seq --sampling-seq
--temp --temperature --top-k --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p
--repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat
--mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file
--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd
--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft --spec-draft-cpu-strict-batch
--cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft
--spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
-r --reverse-prompt -a --alias --tags --embd-normalize --host --port --path --cors-origins --cors-methods --cors-headers
--api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --tools --tools-runtime --mcp-servers-config
--mcp-servers-json --api-key --api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs -to --timeout
--sse-ping-interval --threads-http --cache-reuse --slot-save-path --media-path --reasoning-format -rea --reasoning
--reasoning-effort --reasoning-budget --reasoning-budget-message --chat-template --chat-template-file -sps
--slot-prompt-similarity --log-prompts-dir -p --prompt -f --file -sys --system-prompt -sysf --system-prompt-file -bf
--binary-file --image --audio --video --in-prefix --in-suffix --prompt-cache -gan --grp-attn-n -gaw --grp-attn-w
-co --color -wba --draft-p --ubatch --threads-http-batch -o --output --output-format -mlt
"""
# fmt: on

SILENT: dict[str, int] = {
    **dict.fromkeys(_NO_VALUE.split(), 0),
    **dict.fromkeys(_ONE_VALUE.split(), 1),
    "--control-vector-layer-range": 2,
}

#: Flags with which a program prints something and ends; at some of them it ends before it reads the next.
ENDS_AT_ONCE = frozenset({"--version", "-cl", "--cache-list", "--list-devices"})
INFORMATION = ENDS_AT_ONCE | {"-h", "--help", "--usage", "--completion-bash"}
def _words(text: str) -> list[str]:
    return text.split()


# What the parser throws at in the values of silent flags (``common/arg.cpp``, 0.5.0).
#: Whole numbers of 32 bits (``std::stoi``).
SILENT_COUNTS = frozenset(_words("""
    -t --threads -tb --threads-batch --prio --prio-batch --poll-batch --cpu-strict-batch -n --predict --n-predict --keep --top-k
    --repeat-last-n --yarn-orig-ctx --threads-http --cache-reuse --port -gan --grp-attn-n -gaw --grp-attn-w -to --timeout
    --dry-penalty-last-n --dry-allowed-length --mirostat -lv --verbosity --log-verbosity --embd-normalize --sse-ping-interval
    --reasoning-budget -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch
    --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft --spec-draft-prio-batch --prio-batch-draft
    --spec-draft-poll-batch --poll-batch-draft --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
    --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
    --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m
    --spec-ngram-map-k4v-min-hits --control-vector-layer-range
"""))
#: Whole numbers of 64 bits (``std::stoul``).
SILENT_UNSIGNED = frozenset(_words("-s --seed --cpu-strict --poll"))
#: Numbers of single precision (``std::stof``).
SILENT_NUMBERS = frozenset(_words("""
    --temp --temperature --top-p --min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p
    --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --adaptive-target --adaptive-decay
    --dynatemp-range --dynatemp-exp --mirostat-lr --mirostat-ent --rope-scale --rope-freq-base --rope-freq-scale
    --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -sps --slot-prompt-similarity
    --spec-draft-p-split --draft-p-split --spec-draft-p-min --draft-p-min
"""))
#: Words of flags that are on, off or left to the program.
THREE_WAY = (*TRUE, *FALSE, "auto", "-1")
#: Closed words.
SILENT_WORDS: dict[str, tuple[str, ...]] = {
    "--rope-scaling": ("none", "linear", "yarn"), "--reasoning-format": ("none", "auto", "deepseek", "deepseek-legacy"),
    "-rea": THREE_WAY, "--reasoning": THREE_WAY, "--log-colors": THREE_WAY, "-co": THREE_WAY, "--color": THREE_WAY,
    "--output-format": ("md", "jsonl"),
}  # fmt: skip
#: Flags that took no value in older builds.
OPTIONAL_VALUE = frozenset({"-co", "--color"})
#: Smallest and largest number (None: no limit) in ``RANGES_SINCE`` and later; earlier builds were not looked into.
SILENT_RANGES: dict[str, tuple[int, int | None]] = {
    "--prio": (-1, 3), "--reasoning-budget": (-1, None),
    **dict.fromkeys(_words("--prio-batch --spec-draft-prio --prio-draft --spec-draft-prio-batch --prio-batch-draft"), (0, 3)),
    **dict.fromkeys(_words("--repeat-last-n --dry-penalty-last-n"), (0, None)),
    **dict.fromkeys(_words("--spec-ngram-mod-n-min --spec-ngram-mod-n-max"), (0, 1024)),
    **dict.fromkeys(_words("--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-map-k-size-n"), (1, 1024)),
    **dict.fromkeys(_words("--spec-ngram-map-k-size-m --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m"), (1, 1024)),
    **dict.fromkeys(_words("--spec-ngram-simple-min-hits --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-min-hits"), (1, None)),
}  # fmt: skip
RANGES_SINCE = "0.5.0"
#: Smallest values of counts that the parser, or else the engine behind it, does not go below, and what the smallest means.
SMALLEST: dict[str, tuple[int, str]] = {
    "context.length": (0, "0 is what the model was trained for"), "context.batch": (1, ""), "experts.on_host": (0, ""),
    "speculation.window": (0, ""), "option:n-cpu-ffn": (0, ""), "option:spec-draft-n-cpu-moe": (0, ""),
    "option:checkpoint-min-step": (0, ""),
}  # fmt: skip

#: Flags that stand for a whole download and launch; the model is not known before it is fetched.
BUNDLES = (
    "--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec",
    "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default",
    "--vision-gemma-4b-default", "--vision-gemma-12b-default",
)  # fmt: skip

#: Other environment variables that move bytes; read as they are, never refused.
ENVIRONMENT = (
    "GGML_CUDA_NO_PINNED", "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "GGML_CUDA_DEVICES", "GGML_CUDA_REGISTER_HOST",
    "GGML_OP_OFFLOAD_MIN_BATCH", "CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "GGML_VK_PREFER_HOST_MEMORY",
    "GGML_VK_ALLOW_SYSMEM_FALLBACK", "GGML_VK_FORCE_MAX_BUFFER_SIZE", "GGML_VK_FORCE_MAX_ALLOCATION_SIZE",
    "LLAMA_ATTN_ROT_DISABLE", "GGML_CUDA_ALLREDUCE",
)  # fmt: skip


@lru_cache(maxsize=8)
def flag_names(fork: str) -> dict[str, tuple[tuple[Flag, bool], ...]]:
    """Return every name -> the flags it may mean (differing by version), with whether the name negates."""
    found: dict[str, list[tuple[Flag, bool]]] = {}
    for flag in FLAGS:
        if flag.forks and fork not in flag.forks:
            continue
        for name in flag.names:
            found.setdefault(name, []).append((flag, False))
        for name in flag.negative:
            found.setdefault(name, []).append((flag, True))
    return {name: tuple(flags) for name, flags in found.items()}


def choices(target: str, fork: str) -> tuple[str, ...]:
    """Return the words a fork takes for a setting; the first flag that fits counts."""
    return next((f.choices for f in FLAGS if f.target == target and (not f.forks or fork in f.forks)), ())
