/*
 * An add-on that is well unless a macro makes it faulty: each test case defines one. The code of a fault is given as the
 * macro's text.
 */
#include "npuhal_addon.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef ENTRY
#define ENTRY npuhal_addon_entry
#endif
#ifndef NAME
#define NAME NPUHAL_TEXT("faulty")
#endif
#ifndef ROUTE_NAME
#define ROUTE_NAME NPUHAL_TEXT("route")
#endif
#ifndef MODEL_TYPE
#define MODEL_TYPE NPUHAL_TEXT("llama")
#endif
#ifndef OPTION_KEY
#define OPTION_KEY NPUHAL_TEXT("key")
#endif
#ifndef COMMAND_NAME
#define COMMAND_NAME NPUHAL_TEXT("command")
#endif
#ifndef KIND
#define KIND NPUHAL_SESSION_KIND_STEPPER
#endif
/* Statements run in the place they are called after. */
#ifndef IN_ENTRY
#define IN_ENTRY
#endif
#ifndef IN_FITNESS
#define IN_FITNESS
#endif
#ifndef IN_OPEN
#define IN_OPEN
#endif
#ifndef IN_STEP
#define IN_STEP
#endif
#ifndef IN_TRUNCATE
#define IN_TRUNCATE
#endif
#ifndef IN_GENERATE
#define IN_GENERATE
#endif
#ifndef IN_RUN
#define IN_RUN
#endif
#ifndef IN_ENCODE
#define IN_ENCODE
#endif

/* Sessions that are open: a test asks the subcommand for them. */
static int32_t open_sessions = 0;
/* What the entry was given, and room for what the host lends. */
static const npuhal_host_table *the_host = NULL;
static npuhal_tensor lent;

static void tell(npuhal_text_sink sink, const char *text) {
    npuhal_str piece = { (const uint8_t *)text, strlen(text) };
    sink.write(sink.state, piece);
}

static int32_t fitness(void *state, const npuhal_fitness_request *request, npuhal_service *service) {
    (void)state;
    service->device = 0;
    service->window = 32;
    service->speed = NPUHAL_SPEED_CPU;
    tell(request->detail, "a test");
    IN_FITNESS;
    return NPUHAL_FITNESS_SERVES;
}

typedef struct session {
    uint32_t vocab_size;
    uint32_t held;
} session;

static void close_session(void *state) {
    free(state);
    open_sessions--;
}

static int32_t step(void *state, const npuhal_row *rows, const uint8_t *wanted, size_t rows_len, float *logits,
                    size_t logits_len, const npuhal_control *control, npuhal_text_sink error) {
    session *self = state;
    size_t at = 0;
    (void)error;
    (void)logits_len;
    if (control->check(control->state) != NPUHAL_STATUS_OK) return control->check(control->state);
    for (size_t i = 0; i < rows_len; i++) {
        self->held = rows[i].position + 1;
        if (!wanted[i]) continue;
        for (uint32_t token = 0; token < self->vocab_size; token++) {
            logits[at * self->vocab_size + token] = token == (rows[i].token + 1) % self->vocab_size ? 1.0f : 0.0f;
        }
        at++;
    }
    IN_STEP;
    return NPUHAL_STATUS_OK;
}

static uint64_t truncate(void *state, uint32_t sequence, uint64_t len) {
    session *self = state;
    (void)sequence;
    if (self->held > len) self->held = (uint32_t)len;
    IN_TRUNCATE;
    return self->held;
}

static int32_t generate(void *state, const npuhal_generate_request *request, npuhal_generate_outcome *outcome) {
    (void)state;
    outcome->prefill_ms = 1.5;
    IN_GENERATE;
    for (uint32_t token = 0; token < request->max_tokens; token++) {
        if (!request->on_token(request->on_token_state, token)) break;
    }
    return NPUHAL_STATUS_OK;
}

static npuhal_stepper_table stepper = { sizeof(npuhal_stepper_table), 0, NULL, NULL, step, truncate };
static npuhal_generator_table generator = { sizeof(npuhal_generator_table), 0, generate };

static int32_t open_session(void *state, const npuhal_open_request *request, npuhal_session *out) {
    session *self = calloc(1, sizeof(session));
    (void)state;
    self->vocab_size = (uint32_t)request->model->vocab_size;
    open_sessions++;
    out->kind = KIND;
    out->vocab_size = self->vocab_size;
    out->positions = request->service->window;
    out->rows_per_call = 4;
    out->sequences = 1;
    out->state = self;
    out->stepper = &stepper;
    out->generator = &generator;
    out->close = close_session;
    tell(request->describe, "a test generator");
    IN_OPEN;
    return NPUHAL_STATUS_OK;
}

static int32_t run(void *state, const npuhal_str *arguments, size_t arguments_len, npuhal_text_sink output,
                   npuhal_text_sink error, int32_t *code) {
    (void)state;
    (void)arguments;
    (void)arguments_len;
    (void)error;
    tell(output, "ran");
    *code = open_sessions;
    IN_RUN;
    return NPUHAL_STATUS_OK;
}

static int32_t encode(void *state, npuhal_str text, float *vector, size_t dims, npuhal_text_sink error) {
    (void)state;
    (void)error;
    for (size_t i = 0; i < dims; i++) vector[i] = (float)text.len;
    IN_ENCODE;
    return NPUHAL_STATUS_OK;
}

static npuhal_str model_types[] = { MODEL_TYPE };
static npuhal_option_spec options[] = { { OPTION_KEY, NPUHAL_TEXT("an option") } };
static npuhal_route_table routes[] = {
    { sizeof(npuhal_route_table), 0, ROUTE_NAME, model_types, 1, options, 1, NULL, fitness, open_session },
    { sizeof(npuhal_route_table), 0, NPUHAL_TEXT("second"), model_types, 1, NULL, 0, NULL, fitness, open_session },
};
static npuhal_command_table commands[] = {
    { sizeof(npuhal_command_table), 0, COMMAND_NAME, NPUHAL_TEXT("A command"), NULL, run },
};
static npuhal_encoder_table encoders[] = {
    { sizeof(npuhal_encoder_table), 3, NPUHAL_TEXT("encoder"), NULL, encode },
};
static npuhal_addon_table table = {
    NPUHAL_ABI_VERSION, sizeof(npuhal_addon_table), NAME, NPUHAL_TEXT("1.0"), routes, 1, commands, 1, encoders, 1,
};

const npuhal_addon_table *ENTRY(const npuhal_host_table *host);

const npuhal_addon_table *ENTRY(const npuhal_host_table *host) {
    the_host = host;
    IN_ENTRY;
    return &table;
}
