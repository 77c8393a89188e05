/*
 * The C interface of loadable add-ons of npuhal.
 *
 * An add-on is a shared library that exports one function, npuhal_addon_entry. It takes the host's table and returns the
 * add-on's, which lives as long as the process: a library is never unloaded. Neither side frees what the other allocated;
 * text made at run time goes into a sink of the host, which copies it. Nothing may unwind (C++: throw) over the border.
 * Everything that a request points at is valid for the call only, where nothing else is said.
 *
 * The host checks what comes back: null where a function is wanted, lengths, UTF-8, indices, token ids, numbers that are
 * not finite. Whatever is wrong is an error that names the library's file; the host goes on.
 */
#ifndef NPUHAL_ADDON_H
#define NPUHAL_ADDON_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the interface. A host takes add-ons of its own version only. */
#define NPUHAL_ABI_VERSION 1

/* UTF-8 text that is not owned: len bytes from data, no final zero. Empty text may have a null pointer. */
typedef struct npuhal_str {
    /* First byte. */
    const uint8_t *data;
    /* Bytes. */
    size_t len;
} npuhal_str;

/* Takes text from the other side, which copies it. May be called several times: the pieces are joined. */
typedef struct npuhal_text_sink {
    /* Passed to write. */
    void *state;
    /* Takes one piece. */
    void (*write)(void *state, npuhal_str text);
} npuhal_text_sink;

/* A route's answer to fitness. */
/* It would run the model; the service is filled in. */
#define NPUHAL_FITNESS_SERVES 0
/* Not its kind of model. Silent. */
#define NPUHAL_FITNESS_NOT_MINE 1
/* It would run the model but cannot now; the reason is told, unless the route is optional. */
#define NPUHAL_FITNESS_UNAVAILABLE 2
/* It could not improve on the others; silent. */
#define NPUHAL_FITNESS_OPTIONAL 3
/* The model cannot be run without this route: an error with the reason. */
#define NPUHAL_FITNESS_REQUIRED 4
/* The add-on itself failed; the reason says how. */
#define NPUHAL_FITNESS_FAILED 5

/* How a call ended. */
/* Well. */
#define NPUHAL_STATUS_OK 0
/* It failed; the error sink says how. */
#define NPUHAL_STATUS_FAILED 1
/* The host's cancellation was seen. */
#define NPUHAL_STATUS_CANCELLED 2
/* The host's deadline was seen. */
#define NPUHAL_STATUS_DEADLINE_PASSED 3
/* The device's context is lost; the error sink says how. */
#define NPUHAL_STATUS_LOST 4
/* The add-on panicked, or is in an unknown state for another reason: the session is not called again but to close it. */
#define NPUHAL_STATUS_PANICKED 5

/* Bits of npuhal_route_table.flags. */
/* Where the route is unavailable the others take over without a word. */
#define NPUHAL_ROUTE_FLAGS_OPTIONAL 1

/* Values of npuhal_session.kind. */
/* Token rows in, logits out. */
#define NPUHAL_SESSION_KIND_STEPPER 1
/* Prompt ids in, generated ids out. */
#define NPUHAL_SESSION_KIND_GENERATOR 2

/* Values of npuhal_device.generation. */
/* The host processor. */
#define NPUHAL_GENERATION_CPU 0
/* First-generation XDNA. */
#define NPUHAL_GENERATION_XDNA1 1
/* Second-generation XDNA. */
#define NPUHAL_GENERATION_XDNA2 2

/* Values of npuhal_service.speed. */
/* Made for exactness, not for speed. */
#define NPUHAL_SPEED_REFERENCE 0
/* The host processor. */
#define NPUHAL_SPEED_CPU 1
/* Layers on an NPU and on the host. */
#define NPUHAL_SPEED_HYBRID 2
/* One dispatch of a whole decoder a token. */
#define NPUHAL_SPEED_ENGINE 3
/* One runlist a token. */
#define NPUHAL_SPEED_LANE 4

/* Values of npuhal_service.claim: how the expected speed is known. */
/* Stated by somebody else. */
#define NPUHAL_CLAIM_PUBLISHED 0
/* Ran on the virtual NPU. */
#define NPUHAL_CLAIM_VIRTUAL 1
/* Computed from a model. */
#define NPUHAL_CLAIM_MODELLED 2
/* Measured on hardware. */
#define NPUHAL_CLAIM_MEASURED 3

/* Values of npuhal_placement.yields. */
/* The residual stream. */
#define NPUHAL_YIELDS_HIDDEN 0
/* The residual stream after the final norm. */
#define NPUHAL_YIELDS_NORMED 1
/* Logits. */
#define NPUHAL_YIELDS_LOGITS 2

/* Numbers of tensors, for npuhal_host_table.tensor. Matrices are output features × input features, row after row. */
/* Token embedding. */
#define NPUHAL_ROLE_TOKEN_EMBEDDING 0
/* RMSNorm after the last layer. */
#define NPUHAL_ROLE_FINAL_NORM 1
/* Head; of a tied model the embedding. */
#define NPUHAL_ROLE_HEAD 2
/* Factors of the RoPE frequencies. */
#define NPUHAL_ROLE_ROPE_FACTORS 3
/* RMSNorm before attention; this and all below are of a layer. */
#define NPUHAL_ROLE_INPUT_NORM 16
/* Query projection. */
#define NPUHAL_ROLE_Q 17
/* Query bias. */
#define NPUHAL_ROLE_Q_BIAS 18
/* RMSNorm of each query head. */
#define NPUHAL_ROLE_Q_NORM 19
/* Key projection. */
#define NPUHAL_ROLE_K 20
/* Key bias. */
#define NPUHAL_ROLE_K_BIAS 21
/* RMSNorm of each key head. */
#define NPUHAL_ROLE_K_NORM 22
/* Value projection. */
#define NPUHAL_ROLE_V 23
/* Value bias. */
#define NPUHAL_ROLE_V_BIAS 24
/* Output projection of attention. */
#define NPUHAL_ROLE_O 25
/* RMSNorm before the feed-forward block. */
#define NPUHAL_ROLE_POST_ATTENTION_NORM 26
/* Gate projection. */
#define NPUHAL_ROLE_GATE 27
/* Up projection. */
#define NPUHAL_ROLE_UP 28
/* Down projection. */
#define NPUHAL_ROLE_DOWN 29

/* A tensor in the host's mapping of the model file. Valid until the session that was opened with the model is closed;
 * outside a session, for the call. */
typedef struct npuhal_tensor {
    /* Name in the file. */
    npuhal_str name;
    /* Storage type as GGUF tools print it: F32, F16, BF16, Q4_0, Q4_K, … */
    npuhal_str storage;
    /* First byte. */
    const uint8_t *data;
    /* Bytes. */
    size_t len_bytes;
    /* Output features; 1 for a vector. */
    uint64_t rows;
    /* Input features. */
    uint64_t cols;
} npuhal_tensor;

/* A model as the host has opened it. Of a model that the host cannot read, only path, type and end-of-generation ids are known:
   all sizes are 0, layers too, and there are no tensors. Routes that name its type are asked all the same. */
typedef struct npuhal_model {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* RoPE pairs: 0 elements 2i and 2i+1, 1 elements i and i + dims/2. */
    uint32_t rope_pairing;
    /* File or directory. */
    npuhal_str path;
    /* Model type, the key of route selection. */
    npuhal_str model_type;
    /* Name for people; may be empty. */
    npuhal_str name;
    /* Width of the residual stream. */
    uint64_t hidden_size;
    /* Decoder layers. */
    uint64_t layers;
    /* Query heads. */
    uint64_t heads;
    /* Key and value heads. */
    uint64_t kv_heads;
    /* Elements of a head. */
    uint64_t head_dim;
    /* Width of the feed-forward block. */
    uint64_t intermediate_size;
    /* Rows of the embedding; token ids are below it. */
    uint64_t vocab_size;
    /* Positions the model was trained for. */
    uint64_t context_length;
    /* Rotated elements of a head. */
    uint64_t rope_dims;
    /* Epsilon of every RMSNorm. */
    float rms_norm_eps;
    /* Base of the RoPE frequencies. */
    float rope_theta;
    /* 1 where query, key and value projections have biases. */
    uint32_t qkv_bias;
    /* 1 where query and key heads have an RMSNorm. */
    uint32_t qk_norm;
    /* 1 where the head is the embedding. */
    uint32_t tied_head;
    /* Beginning-of-sequence id; UINT32_MAX where there is none. */
    uint32_t bos;
    /* Ids that end a generation. */
    const uint32_t *eos;
    /* How many. */
    size_t eos_len;
    /* The host's own, for npuhal_host_table.tensor. */
    const void *handle;
} npuhal_model;

/* A device that has passed its check. */
typedef struct npuhal_device {
    /* Id, e.g. cpu, npu5. */
    npuhal_str id;
    /* Name for people. */
    npuhal_str name;
    /* Kind; see NPUHAL_GENERATION_*. */
    uint32_t generation;
    /* 1 for the in-process twin of the hardware. */
    uint32_t is_virtual;
    /* Usable columns of the array, or worker threads of a CPU. */
    uint32_t columns;
    /* Core rows of the array; 1 for a CPU. */
    uint32_t core_rows;
    /* Memory a model may take; 0 where unknown. */
    uint64_t memory_bytes;
    /* Capabilities. */
    const npuhal_str *features;
    /* How many. */
    size_t features_len;
} npuhal_device;

/* An option of the user. */
typedef struct npuhal_key_value {
    /* Key, as the route declared it. */
    npuhal_str key;
    /* Value; not checked by the host. */
    npuhal_str value;
} npuhal_key_value;

/* What the user asked of the session. */
typedef struct npuhal_options {
    /* Arithmetic of CPU segments: fast, exact, … */
    npuhal_str numerics;
    /* Threads; 0 leaves it to the route. */
    uint32_t threads;
    /* Positions of a sequence; 0 leaves it to the route. */
    uint32_t context_positions;
    /* Sequences side by side; 0 leaves it to the route. */
    uint32_t sequences;
    /* Not used; 0. */
    uint32_t reserved;
    /* Options that the route has declared. */
    const npuhal_key_value *pairs;
    /* How many. */
    size_t pairs_len;
} npuhal_options;

/* Arguments of npuhal_route_table.fitness. Everything is valid for the call only. */
typedef struct npuhal_fitness_request {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Not used; 0. */
    uint32_t reserved;
    /* The model. */
    const npuhal_model *model;
    /* Usable devices. */
    const npuhal_device *devices;
    /* How many. */
    size_t devices_len;
    /* Options. */
    const npuhal_options *options;
    /* Takes the reason of a decline. */
    npuhal_text_sink reason;
    /* Takes what is worth saying beside the device's name. */
    npuhal_text_sink detail;
} npuhal_fitness_request;

/* Where a range of layers runs. */
typedef struct npuhal_placement {
    /* First layer. */
    uint32_t start;
    /* Behind the last layer. */
    uint32_t end;
    /* Index of the device in the request. */
    uint32_t device;
    /* What is handed on; see NPUHAL_YIELDS_*. */
    uint32_t yields;
} npuhal_placement;

/* Entries of npuhal_service.placement. */
#define NPUHAL_MAX_PLACEMENT 64

/* How a route would run a model. The host passes it zeroed. */
typedef struct npuhal_service {
    /* Index, in the request's devices, of the one that does the main part. */
    uint32_t device;
    /* Positions of a sequence: prompt and answer together; at least 1. */
    uint32_t window;
    /* Expected class of speed; see NPUHAL_SPEED_*. */
    uint32_t speed;
    /* How the figure is known; see NPUHAL_CLAIM_*. */
    uint32_t claim;
    /* Expected decode speed; 0 where not known. */
    double tokens_per_second;
    /* Memory for weights and KV cache; 0 where not known. */
    uint64_t memory_bytes;
    /* Used entries of placement; 0 means all layers on device. */
    uint32_t placement_len;
    /* Not used; 0. */
    uint32_t reserved;
    /* Where each part runs, in order, without a gap. */
    npuhal_placement placement[NPUHAL_MAX_PLACEMENT];
} npuhal_service;

/* Arguments of npuhal_route_table.open. Valid for the call only, but for tensors of the model. */
typedef struct npuhal_open_request {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Not used; 0. */
    uint32_t reserved;
    /* The model. */
    const npuhal_model *model;
    /* Usable devices, those of the service first to last as in its placement. */
    const npuhal_device *devices;
    /* How many. */
    size_t devices_len;
    /* What fitness said. */
    const npuhal_service *service;
    /* Options. */
    const npuhal_options *options;
    /* Takes the reason of a failure. */
    npuhal_text_sink error;
    /* Takes one line about a generator, for people. */
    npuhal_text_sink describe;
} npuhal_open_request;

/* The caller's hold on a running call. Valid for the call only. */
typedef struct npuhal_control {
    /* Passed to check. */
    const void *state;
    /* NPUHAL_STATUS_OK, NPUHAL_STATUS_CANCELLED or NPUHAL_STATUS_DEADLINE_PASSED. May be called from any thread. */
    int32_t (*check)(const void *state);
} npuhal_control;

/* One position of one sequence. */
typedef struct npuhal_row {
    /* Sequence, from 0. */
    uint32_t sequence;
    /* Token id. */
    uint32_t token;
    /* Position, from 0; ascending and gapless. */
    uint32_t position;
} npuhal_row;

/* Functions of a session that yields logits. One thread at a time calls them, not always the same. */
typedef struct npuhal_stepper_table {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Not used; 0. */
    uint32_t reserved;
    /* Called before a generation. May be null. */
    int32_t (*begin)(void *state, npuhal_text_sink error);
    /* Called after a generation, also after a failed one. May be null. */
    void (*end)(void *state);
    /* Runs rows, at most rows_per_call, and writes one row of vocab_size logits for each row whose flag is 1, in
     * order. All are finite: a token that must not be chosen has a very low one, as -1e30. */
    int32_t (*step)(void *state, const npuhal_row *rows, const uint8_t *wanted, size_t rows_len, float *logits, size_t logits_len, const npuhal_control *control, npuhal_text_sink error);
    /* Forgets positions from len on; returns how many remain, at most len. */
    uint64_t (*truncate)(void *state, uint32_t sequence, uint64_t len);
} npuhal_stepper_table;

/* Arguments of npuhal_generator_table.generate. */
typedef struct npuhal_generate_request {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Tokens to generate at most. */
    uint32_t max_tokens;
    /* Prompt ids. */
    const uint32_t *prompt;
    /* How many. */
    size_t prompt_len;
    /* 1.0 is off. */
    float repetition_penalty;
    /* Tokens the penalty looks back over. */
    uint32_t penalty_window;
    /* Passed to on_token. */
    void *on_token_state;
    /* Takes a token as soon as it is known; 0 means: stop now. Called on the thread of the call. */
    int32_t (*on_token)(void *state, uint32_t token);
    /* Cancellation and deadline. */
    const npuhal_control *control;
    /* Takes the reason of a failure. */
    npuhal_text_sink error;
} npuhal_generate_request;

/* What a generator reports at the end. */
typedef struct npuhal_generate_outcome {
    /* Time spent on the prompt. */
    double prefill_ms;
    /* Time spent on the rest. */
    double decode_ms;
    /* 1 where an end-of-generation id ended it. */
    uint32_t stopped_at_eos;
    /* Prompt positions taken from the route's own cache. */
    uint32_t reused;
} npuhal_generate_outcome;

/* Functions of a session that yields tokens. */
typedef struct npuhal_generator_table {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Not used; 0. */
    uint32_t reserved;
    /* Generates. */
    int32_t (*generate)(void *state, const npuhal_generate_request *request, npuhal_generate_outcome *outcome);
} npuhal_generator_table;

/* An open session. The host passes it zeroed. */
typedef struct npuhal_session {
    /* See NPUHAL_SESSION_KIND_*. */
    uint32_t kind;
    /* Entries of a logits row (stepper). */
    uint32_t vocab_size;
    /* Positions of a sequence. */
    uint32_t positions;
    /* Rows of one call at most (stepper). */
    uint32_t rows_per_call;
    /* Sequences held side by side (stepper). */
    uint32_t sequences;
    /* The route's own repetition penalty (generator); 0 is 1.0, off. */
    float default_repetition_penalty;
    /* 1 where the template leaves the model inside a thought (generator). */
    uint32_t opens_think;
    /* Not used; 0. */
    uint32_t reserved;
    /* Passed to every function. One thread at a time uses it, not always the same. */
    void *state;
    /* Functions of a stepper; lives as long as the session. */
    const npuhal_stepper_table *stepper;
    /* Functions of a generator; lives as long as the session. */
    const npuhal_generator_table *generator;
    /* Called once, last, also where the session broke: what cannot be freed then has to be left. May be null. */
    void (*close)(void *state);
} npuhal_session;

/* An option that a route takes. */
typedef struct npuhal_option_spec {
    /* Key. */
    npuhal_str key;
    /* One line for people; may be empty. */
    npuhal_str help;
} npuhal_option_spec;

/* A route. Its functions may be called from any thread, also at the same time. */
typedef struct npuhal_route_table {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* See NPUHAL_ROUTE_FLAGS_*. */
    uint32_t flags;
    /* Name, unique among loaded add-ons. */
    npuhal_str name;
    /* Model types; * for all. */
    const npuhal_str *model_types;
    /* How many; at least 1. */
    size_t model_types_len;
    /* Options it takes. */
    const npuhal_option_spec *options;
    /* How many. */
    size_t options_len;
    /* Passed to every function. */
    void *state;
    /* Whether and how it would run a model; see NPUHAL_FITNESS_*. */
    int32_t (*fitness)(void *state, const npuhal_fitness_request *request, npuhal_service *service);
    /* Opens a session. */
    int32_t (*open)(void *state, const npuhal_open_request *request, npuhal_session *session);
} npuhal_route_table;

/* A subcommand of the program. */
typedef struct npuhal_command_table {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Not used; 0. */
    uint32_t reserved;
    /* Name: lower-case letters, digits and -. */
    npuhal_str name;
    /* One line for people. */
    npuhal_str help;
    /* Passed to run. */
    void *state;
    /* Runs with the arguments behind the name. code becomes the program's exit code, 0 to 255. */
    int32_t (*run)(void *state, const npuhal_str *arguments, size_t arguments_len, npuhal_text_sink output, npuhal_text_sink error, int32_t *code);
} npuhal_command_table;

/* Turns text into a vector. */
typedef struct npuhal_encoder_table {
    /* Bytes of this struct. */
    uint32_t size_bytes;
    /* Elements of a vector; at least 1. */
    uint32_t dims;
    /* Name, unique among loaded add-ons. */
    npuhal_str name;
    /* Passed to encode. */
    void *state;
    /* Writes dims finite numbers. */
    int32_t (*encode)(void *state, npuhal_str text, float *vector, size_t dims, npuhal_text_sink error);
} npuhal_encoder_table;

/* What the host offers. Lives as long as the process. */
typedef struct npuhal_host_table {
    /* NPUHAL_ABI_VERSION of the host. First in every version. */
    uint32_t abi_version;
    /* Bytes of this struct. Second in every version. */
    uint32_t size_bytes;
    /* Version of npuhal, for messages. */
    npuhal_str version;
    /* The tensor of a NPUHAL_ROLE_* and, from 16 on, a layer. NPUHAL_STATUS_OK, or NPUHAL_STATUS_FAILED where the
     * model has none. */
    int32_t (*tensor)(const void *handle, uint32_t role, uint32_t layer, npuhal_tensor *tensor);
} npuhal_host_table;

/* What an add-on offers. */
typedef struct npuhal_addon_table {
    /* NPUHAL_ABI_VERSION it was built for. First in every version. */
    uint32_t abi_version;
    /* Bytes of this struct. Second in every version. */
    uint32_t size_bytes;
    /* Name, for messages. */
    npuhal_str name;
    /* Version, for messages. */
    npuhal_str version;
    /* Routes. */
    const npuhal_route_table *routes;
    /* How many. */
    size_t routes_len;
    /* Subcommands. */
    const npuhal_command_table *commands;
    /* How many. */
    size_t commands_len;
    /* Encoders. */
    const npuhal_encoder_table *encoders;
    /* How many. */
    size_t encoders_len;
} npuhal_addon_table;

/* The function that an add-on exports: returns its table, or null where it does not want to run with this host. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const npuhal_addon_table *npuhal_addon_entry(const npuhal_host_table *host);

/* A text literal as npuhal_str. */
#define NPUHAL_TEXT(literal) { (const uint8_t *)(literal), sizeof(literal) - 1 }

#ifdef __cplusplus
}
#endif

#endif
