// Launches llama.cpp for real and prints the device memory in use at every stage, as the driver reports it.
//
// The runs of tests/data/llama_cpp_real.json.gz were read with this program. Build it against llama.cpp 0.5.0 (its
// interface of llama-ext.h is not stable), with the CUDA back end:
//
//   g++ -O1 -std=c++17 -I llama.cpp/include -I llama.cpp/ggml/include -I llama.cpp/src -o real_launch bench/real_launch.cpp
//       -L llama.cpp/build/bin -lllama -lggml -lggml-base -Wl,-rpath,llama.cpp/build/bin -ldl
//
//   CUDA_VISIBLE_DEVICES=0 UUIDS=GPU-... ./real_launch m=model.gguf ngl=99 c=32768 [b= ub= np= fa=on|off ctk= ctv= ncmoe=
//       sm=none|layer|tensor ts=1,1 kvo=0 swafull=1 deep=32768]
//
// UUIDS: the cards to read, as `nvidia-smi -L` names them. One JSON line per stage: idle, backend, model, context (with
// what the engine itself reports per buffer: model, context, compute), prompt (one full batch), decode (four tokens),
// deep (the context filled up to `deep` tokens). Exit status 2 to 6: the model, the context, the prompt, the first
// tokens or the filling failed; a signal: the engine aborted.

#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Memory {
    unsigned long long total, free, used;
};

// The management library is loaded, not linked: it comes with the driver.
class Cards {
  public:
    explicit Cards(const char * uuids) {
        void * library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (library == nullptr || uuids == nullptr) {
            return;
        }
        reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"))();
        auto by_uuid = reinterpret_cast<int (*)(const char *, void **)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
        read_ = reinterpret_cast<int (*)(void *, Memory *)>(dlsym(library, "nvmlDeviceGetMemoryInfo"));
        std::istringstream names(uuids);
        for (std::string name; std::getline(names, name, ',');) {
            void * card = nullptr;
            if (by_uuid(name.c_str(), &card) == 0) {
                cards_.push_back(card);
            }
        }
    }

    void say(const char * stage, const std::string & more = "") const {
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
        std::printf("{\"stage\":\"%s\",\"seconds\":%.2f,\"used\":[", stage, seconds);
        for (size_t i = 0; i < cards_.size(); i++) {
            Memory memory = {0, 0, 0};
            read_(cards_[i], &memory);
            std::printf("%s%llu", i ? "," : "", memory.used);
        }
        std::printf("]%s}\n", more.c_str());
        std::fflush(stdout);
    }

  private:
    std::vector<void *> cards_;
    int (*read_)(void *, Memory *) = nullptr;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Options {
  public:
    Options(int count, char ** words) {
        for (int i = 1; i < count; i++) {
            const std::string word = words[i];
            const size_t equals = word.find('=');
            values_[word.substr(0, equals)] = equals == std::string::npos ? "1" : word.substr(equals + 1);
        }
    }
    std::string text(const char * name, const char * otherwise) const {
        const auto found = values_.find(name);
        return found == values_.end() ? otherwise : found->second;
    }
    int number(const char * name, int otherwise) const {
        const auto found = values_.find(name);
        return found == values_.end() ? otherwise : std::atoi(found->second.c_str());
    }

  private:
    std::map<std::string, std::string> values_;
};

ggml_type type_named(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(i));
        if (known != nullptr && name == known) {
            return static_cast<ggml_type>(i);
        }
    }
    std::fprintf(stderr, "no type is called %s\n", name.c_str());
    std::exit(9);
}

void only_problems(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
        std::fputs(text, stderr);
    }
}

llama_model * load(const Options & options) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = options.number("ngl", 99);
    const std::string split = options.text("sm", "layer");
    params.split_mode = split == "none" ? LLAMA_SPLIT_MODE_NONE : split == "tensor" ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_LAYER;
    float shares[64] = {0};
    std::istringstream given(options.text("ts", ""));
    int cards = 0;
    for (std::string share; cards < 64 && std::getline(given, share, ',');) {
        shares[cards++] = std::strtof(share.c_str(), nullptr);
    }
    params.tensor_split = shares;
    std::vector<std::string> patterns;
    for (int i = 0; i < options.number("ncmoe", 0); i++) {
        patterns.push_back("blk\\." + std::to_string(i) + "\\.ffn_(up|down|gate|gate_up)_(ch|)exps");
    }
    std::vector<llama_model_tensor_buft_override> overrides;
    for (const std::string & pattern : patterns) {
        overrides.push_back({pattern.c_str(), ggml_backend_cpu_buffer_type()});
    }
    if (!overrides.empty()) {
        overrides.push_back({nullptr, nullptr});
        params.tensor_buft_overrides = overrides.data();
    }
    return llama_model_load_from_file(options.text("m", "").c_str(), params);
}

llama_context * create(llama_model * model, const Options & options) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = options.number("c", 0);
    params.n_batch = options.number("b", 2048);
    params.n_ubatch = options.number("ub", 512);
    params.n_seq_max = options.number("np", 1);
    params.swa_full = options.number("swafull", 0) != 0;
    params.offload_kqv = options.number("kvo", 1) != 0;
    const std::string flash = options.text("fa", "auto");
    params.flash_attn_type = flash == "on"    ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                             : flash == "off" ? LLAMA_FLASH_ATTN_TYPE_DISABLED
                                              : LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.type_k = type_named(options.text("ctk", "f16"));
    params.type_v = type_named(options.text("ctv", "f16"));
    return llama_init_from_model(model, params);
}

std::string reported(llama_context * context) {
    std::string text = ",\"n_ctx\":" + std::to_string(llama_n_ctx(context)) + ",\"buffers\":{";
    for (const auto & [type, bytes] : llama_get_memory_breakdown(context)) {
        text += std::string(text.back() == '{' ? "" : ",") + "\"" + ggml_backend_buft_name(type) + (ggml_backend_buft_is_host(type) ? "|host" : "") + "\":[" +
                std::to_string(bytes.model) + "," + std::to_string(bytes.context) + "," + std::to_string(bytes.compute) + "]";
    }
    return text + "}";
}

}  // namespace

int main(int count, char ** words) {
    const Options options(count, words);
    const Cards cards(std::getenv("UUIDS"));
    llama_log_set(only_problems, nullptr);
    cards.say("idle");

    llama_backend_init();
    ggml_backend_load_all();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        ggml_backend_dev_memory(ggml_backend_dev_get(i), &free_bytes, &total_bytes);  // starts the device
    }
    cards.say("backend");

    llama_model * model = load(options);
    if (model == nullptr) {
        return 2;
    }
    cards.say("model");
    llama_context * context = create(model, options);
    if (context == nullptr) {
        return 3;
    }
    cards.say("context", reported(context));

    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const int cells = static_cast<int>(llama_n_ctx_seq(context));
    const int full = std::max(1, std::min(static_cast<int>(llama_n_batch(context)), cells - 8));
    llama_batch batch = llama_batch_init(full, 0, 1);
    int position = 0;
    const auto feed = [&](int tokens) {
        batch.n_tokens = tokens;
        for (int i = 0; i < tokens; i++) {
            batch.token[i] = 1 + (position * 7 + 3) % std::max(1, std::min(vocabulary - 2, 20000));
            batch.pos[i] = position++;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = i == tokens - 1;
        }
        const int failed = llama_decode(context, batch);
        llama_synchronize(context);
        return failed == 0;
    };
    if (!feed(full)) {
        return 4;
    }
    cards.say("prompt");
    for (int i = 0; i < 4; i++) {
        if (!feed(1)) {
            return 5;
        }
    }
    cards.say("decode");
    const int deep = options.number("deep", 0);
    while (position + full <= cells && position < deep) {
        if (!feed(full)) {
            return 6;
        }
    }
    if (deep > 0) {
        cards.say("deep", ",\"tokens\":" + std::to_string(position));
    }
    return 0;
}
