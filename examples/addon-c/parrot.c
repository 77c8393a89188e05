/*
 * An add-on in C. Its route answers with the ids of the prompt; its subcommand prints what it was given; its encoder counts
 * vowels.
 *
 *   cc -shared -fPIC -O2 -I addon/abi/include -o parrot.so examples/addon-c/parrot.c
 *   npuhal run --addon ./parrot.so --raw "Polly wants a cracker"
 */
#include "npuhal_addon.h"
#include <stdlib.h>
#include <string.h>

#define COUNT(list) (sizeof(list) / sizeof((list)[0]))

static void tell(npuhal_text_sink sink, const char *text) {
    npuhal_str piece = { (const uint8_t *)text, strlen(text) };
    sink.write(sink.state, piece);
}

static int is(npuhal_str text, const char *wanted) {
    return text.len == strlen(wanted) && memcmp(text.data, wanted, text.len) == 0;
}

/* ---- the route ---- */

typedef struct parrot {
    uint32_t positions;
    uint32_t vocab_size;
    int backwards;
} parrot;

/* The option parrot-order: forwards (the default) or backwards; -1 for anything else. */
static int order(const npuhal_options *options) {
    for (size_t i = 0; i < options->pairs_len; i++) {
        if (is(options->pairs[i].key, "parrot-order")) {
            if (is(options->pairs[i].value, "forwards")) return 0;
            return is(options->pairs[i].value, "backwards") ? 1 : -1;
        }
    }
    return 0;
}

static int32_t fitness(void *state, const npuhal_fitness_request *request, npuhal_service *service) {
    (void)state;
    if (order(request->options) < 0) {
        tell(request->reason, "parrot-order takes forwards or backwards");
        return NPUHAL_FITNESS_UNAVAILABLE;
    }
    for (size_t i = 0; i < request->devices_len; i++) {
        if (request->devices[i].generation == NPUHAL_GENERATION_CPU) {
            uint32_t asked = request->options->context_positions;
            service->device = (uint32_t)i;
            service->window = asked ? asked : 512;
            service->speed = NPUHAL_SPEED_REFERENCE;
            tell(request->detail, "says what it hears");
            return NPUHAL_FITNESS_SERVES;
        }
    }
    tell(request->reason, "the CPU is not usable");
    return NPUHAL_FITNESS_UNAVAILABLE;
}

static int32_t generate(void *state, const npuhal_generate_request *request, npuhal_generate_outcome *outcome) {
    const parrot *self = state;
    size_t count = request->prompt_len < request->max_tokens ? request->prompt_len : request->max_tokens;
    (void)outcome;
    for (size_t i = 0; i < count; i++) {
        int32_t status = request->control->check(request->control->state);
        if (status != NPUHAL_STATUS_OK) return status;
        uint32_t token = request->prompt[self->backwards ? request->prompt_len - 1 - i : i];
        if (!request->on_token(request->on_token_state, token)) break;
    }
    return NPUHAL_STATUS_OK;
}

static const npuhal_generator_table generator = { sizeof(npuhal_generator_table), 0, generate };

static int32_t open(void *state, const npuhal_open_request *request, npuhal_session *session) {
    (void)state;
    parrot *self = malloc(sizeof(parrot));
    if (!self) {
        tell(request->error, "no memory");
        return NPUHAL_STATUS_FAILED;
    }
    self->positions = request->service->window;
    self->vocab_size = (uint32_t)request->model->vocab_size;
    self->backwards = order(request->options) == 1;
    tell(request->describe, "a parrot");
    session->kind = NPUHAL_SESSION_KIND_GENERATOR;
    session->positions = self->positions;
    session->state = self;
    session->generator = &generator;
    session->close = free;
    return NPUHAL_STATUS_OK;
}

/* The last is a type whose files npuhal does not read: the route gets the path and the type. */
static const npuhal_str model_types[] = {
    NPUHAL_TEXT("llama"), NPUHAL_TEXT("qwen2"), NPUHAL_TEXT("qwen3"), NPUHAL_TEXT("qwen3_5_moe"),
};

static const npuhal_option_spec options[] = {
    { NPUHAL_TEXT("parrot-order"), NPUHAL_TEXT("forwards or backwards") },
};

static const npuhal_route_table routes[] = { {
    sizeof(npuhal_route_table), 0, NPUHAL_TEXT("parrot"), model_types, COUNT(model_types), options, COUNT(options), NULL,
    fitness, open,
} };

/* ---- the subcommand ---- */

static int32_t run(void *state, const npuhal_str *arguments, size_t arguments_len, npuhal_text_sink output,
                   npuhal_text_sink error, int32_t *code) {
    (void)state;
    (void)error;
    for (size_t i = 0; i < arguments_len; i++) {
        output.write(output.state, arguments[i]);
        tell(output, i + 1 < arguments_len ? " " : "\n");
    }
    *code = arguments_len > 0 ? 0 : 3;
    return NPUHAL_STATUS_OK;
}

static const npuhal_command_table commands[] = {
    { sizeof(npuhal_command_table), 0, NPUHAL_TEXT("squawk"), NPUHAL_TEXT("Print the arguments"), NULL, run },
};

/* ---- the encoder ---- */

static int32_t encode(void *state, npuhal_str text, float *vector, size_t dims, npuhal_text_sink error) {
    static const char vowels[] = "aeiou";
    (void)state;
    (void)error;
    for (size_t d = 0; d < dims; d++) {
        vector[d] = 0.0f;
        for (size_t i = 0; i < text.len; i++) vector[d] += text.data[i] == (uint8_t)vowels[d];
    }
    return NPUHAL_STATUS_OK;
}

static const npuhal_encoder_table encoders[] = { { sizeof(npuhal_encoder_table), 5, NPUHAL_TEXT("vowels"), NULL, encode } };

/* ---- the entry ---- */

static const npuhal_addon_table table = {
    NPUHAL_ABI_VERSION, sizeof(npuhal_addon_table), NPUHAL_TEXT("parrot"), NPUHAL_TEXT("1.0"),
    routes, COUNT(routes), commands, COUNT(commands), encoders, COUNT(encoders),
};

const npuhal_addon_table *npuhal_addon_entry(const npuhal_host_table *host) {
    return host->abi_version == NPUHAL_ABI_VERSION ? &table : NULL;
}
