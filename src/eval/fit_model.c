/* The passes of a calibration over a model. */
#include "eval/fit_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "eval/fit_choice.h"
#include "eval/runner.h"

#define SINK 64
#define RECENT 256
/* Text chunks kept out of the sums, spread over the text. */
#define HELDOUT_CHUNKS 2
#define MAX_CHUNKS (1 << 20)

static void no_rotations(oscar_rotations **rotations) {
    oscar_rotations_free(*rotations);
    *rotations = NULL;
}

/* ---- Texts ---------------------------------------------------------------------------------- */

typedef struct fit_text {
    token_chunks fit;     /* what is summed */
    token_chunks heldout; /* what is measured, at most FIT_HELDOUT_TOKENS each */
} fit_text;

static void fit_text_free(fit_text *text) {
    token_chunks_free(&text->fit);
    token_chunks_free(&text->heldout);
}

/* Moves chunk i of `from` to the end of `to`, cut to `most` tokens. */
static void move_chunk(token_chunks *from, int32_t i, int32_t most, token_chunks *to) {
    to->token[to->n_chunks] = from->token[i];
    to->length[to->n_chunks] = from->length[i] < most ? from->length[i] : most;
    to->n_chunks++;
    for (int32_t j = i; j + 1 < from->n_chunks; j++) {
        from->token[j] = from->token[j + 1];
        from->length[j] = from->length[j + 1];
    }
    from->token[--from->n_chunks] = NULL;
}

/* Takes the held-out chunks from a third and two thirds of the text; a text that was too short for
 * all chunks gives the last quarter of its first one. */
static oscar_status split_text(fit_text *text, int32_t n_wanted, oscar_error *error) {
    token_chunks *fit = &text->fit, *held = &text->heldout;
    held->token = calloc(HELDOUT_CHUNKS, sizeof *held->token);
    held->length = calloc(HELDOUT_CHUNKS, sizeof *held->length);
    if (!held->token || !held->length) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for tokens");
    if (fit->n_chunks == n_wanted) {
        int32_t n = fit->n_chunks;
        move_chunk(fit, 2 * n / 3, FIT_HELDOUT_TOKENS, held);
        move_chunk(fit, n / 3, FIT_HELDOUT_TOKENS, held);
        return OSCAR_OK;
    }
    int32_t n = fit->length[0] / 4;
    if (n < 1) return OSCAR_OK; /* too few tokens for anything: refused by the caller */
    held->token[0] = malloc((size_t)n * sizeof **held->token);
    if (!held->token[0]) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for tokens");
    fit->length[0] -= n;
    memcpy(held->token[0], fit->token[0] + fit->length[0], (size_t)n * sizeof **held->token);
    held->length[0] = n < FIT_HELDOUT_TOKENS ? n : FIT_HELDOUT_TOKENS;
    held->n_chunks = 1;
    return OSCAR_OK;
}

static oscar_status read_texts(struct llama_model *model, const fit_options *options, fit_text *text, oscar_error *error) {
    memset(text, 0, sizeof *text);
    int64_t n_fit = (options->n_tokens + FIT_CHUNK_TOKENS - 1) / FIT_CHUNK_TOKENS;
    if (n_fit < 1 || n_fit > MAX_CHUNKS)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "the number of tokens is %lld, expected 1 to %lld",
                         (long long)options->n_tokens, (long long)MAX_CHUNKS * FIT_CHUNK_TOKENS);
    int32_t n_chunks = (int32_t)n_fit + HELDOUT_CHUNKS;
    int32_t chunk_tokens = (int32_t)((options->n_tokens + n_fit - 1) / n_fit);
    oscar_status status;
    if (options->text_path) {
        text_file file;
        status = text_open(&file, options->text_path, error);
        if (status != OSCAR_OK) return status;
        status = text_chunks_spread(llama_model_get_vocab(model), &file, n_chunks, chunk_tokens, &text->fit, error);
        text_close(&file);
    } else {
        status = text_chunks_sampled(model, n_chunks, chunk_tokens, options->seed, options->n_threads,
                                     options->progress, options->user, &text->fit, error);
    }
    if (status == OSCAR_OK) status = split_text(text, n_chunks, error);
    if (status != OSCAR_OK) {
        fit_text_free(text);
        return status;
    }
    int64_t total = token_chunks_total(&text->fit) + token_chunks_total(&text->heldout);
    if (token_chunks_total(&text->fit) < FIT_TOKENS_LEAST) {
        fit_text_free(text);
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "%s has %lld tokens: too few to calibrate on (at least %d, better %d)",
                         options->text_path ? options->text_path : "the sampled text", (long long)total,
                         FIT_TOKENS_LEAST * 4 / 3 + 1, FIT_TOKENS_DEFAULT);
    }
    return OSCAR_OK;
}

/* ---- Passes --------------------------------------------------------------------------------- */

typedef struct fit_pass {
    const fit_options *options;
    runner runner;
    const oscar_layer *layers; /* [n_layers] */
    int32_t n_layers;
    calib *sums;
    fit_choice *choice; /* passes 2 and 3 */
    oscar_status status; /* of the observer: the first failure */
    oscar_error error;
} fit_pass;

static void observe_sums(void *user, int32_t layer, const oscar_step *step) {
    fit_pass *pass = user;
    if (pass->status == OSCAR_OK) pass->status = calib_add(pass->sums, layer, step, &pass->error);
}

static void observe_choice(void *user, int32_t layer, const oscar_step *step) {
    fit_pass *pass = user;
    if (pass->status == OSCAR_OK) pass->status = fit_choice_observe(pass->choice, layer, step, &pass->error);
}

static oscar_status run_chunks(fit_pass *pass, const token_chunks *chunks, oscar_llama_observer observer,
                               const char *what, oscar_error *error) {
    int64_t done = 0, total = token_chunks_total(chunks);
    oscar_status status = OSCAR_OK;
    oscar_llama_set_observer(pass->runner.layer, observer, pass);
    for (int32_t i = 0; i < chunks->n_chunks && status == OSCAR_OK; i++) {
        runner_clear(&pass->runner);
        for (int32_t t = 0; t < chunks->length[i] && status == OSCAR_OK; t += pass->runner.n_batch) {
            int32_t n = chunks->length[i] - t;
            if (n > pass->runner.n_batch) n = pass->runner.n_batch;
            status = runner_decode(&pass->runner, n, chunks->token[i] + t, t, NULL, error);
            if (status == OSCAR_OK && pass->status != OSCAR_OK)
                status = error_set(error, pass->status, pass->error.position, "%s", pass->error.message);
            done += n;
            if (pass->options->progress) pass->options->progress(pass->options->user, what, done, total);
        }
    }
    oscar_llama_set_observer(pass->runner.layer, NULL, NULL);
    return status;
}

/* The exact context, and the geometry that its first token shows. */
static oscar_status begin_pass(fit_pass *pass, struct llama_model *model, const fit_text *text, oscar_error *error) {
    oscar_llama_options exact = OSCAR_LLAMA_OPTIONS_INIT;
    exact.kv_type = OSCAR_KV_F32;
    oscar_status status = runner_init(&pass->runner, model, FIT_CHUNK_TOKENS, FIT_HELDOUT_TOKENS, pass->options->n_threads, &exact, error);
    if (status != OSCAR_OK) return status;
    status = runner_decode(&pass->runner, 1, text->fit.token[0], 0, NULL, error);
    if (status != OSCAR_OK) return status;
    pass->layers = oscar_llama_layers(pass->runner.layer, &pass->n_layers);
    return calib_new(&pass->sums, pass->layers, pass->n_layers, error);
}

static oscar_status sum_pass(fit_pass *pass, struct llama_model *model, const fit_text *text, fit_report *report, oscar_error *error) {
    report->n_tokens = token_chunks_total(&text->fit);
    report->n_heldout = token_chunks_total(&text->heldout);
    report->text_hash = text->fit.hash;
    oscar_status status = begin_pass(pass, model, text, error);
    if (status == OSCAR_OK) status = run_chunks(pass, &text->fit, observe_sums, "calibrating", error);
    if (status == OSCAR_OK && pass->options->warn && report->n_tokens < calib_enough_tokens(pass->sums)) {
        char message[200];
        snprintf(message, sizeof message, "%lld tokens are few for this model: expect worse rotations than from %lld or more",
                 (long long)report->n_tokens, (long long)calib_enough_tokens(pass->sums));
        pass->options->warn(pass->options->user, message);
    }
    return status;
}

static void end_pass(fit_pass *pass) {
    fit_choice_free(pass->choice);
    calib_free(pass->sums);
    runner_destroy(&pass->runner);
}

/* The windows shrink where the held-out text is short. */
static fit_choice_options choice_options(const fit_options *options, const fit_text *text, struct llama_model *model) {
    int32_t n = text->heldout.length[0], trained = llama_model_n_ctx_train(model);
    int32_t context = options->context > 0 ? options->context : trained < 32768 ? trained : 32768;
    return (fit_choice_options){
        .sink = n / 16 < SINK ? n / 16 : SINK,
        .recent = n / 4 < RECENT ? n / 4 : RECENT,
        .context = context,
        .n_tracked = options->n_tracked,
        .bits_budget = options->bits_budget,
        .n_threads = options->n_threads,
    };
}

static oscar_status choose(fit_pass *pass, struct llama_model *model, const fit_text *text, oscar_rotations *ours,
                           const oscar_rotations *zoo, fit_report *report, oscar_error *error) {
    fit_choice_options options = choice_options(pass->options, text, model);
    /* Most of the time goes into measuring, by threads of its own: ggml's would only spin beside. */
    llama_set_n_threads(pass->runner.ctx, 1, 1);
    oscar_status status = fit_choice_new(&pass->choice, pass->sums, ours, zoo, &options, error);
    if (status == OSCAR_OK) status = run_chunks(pass, &text->heldout, observe_choice, "choosing tracked pairs", error);
    if (status == OSCAR_OK) status = fit_choice_next(pass->choice, error);
    if (status == OSCAR_OK) status = run_chunks(pass, &text->heldout, observe_choice, "choosing gain and bits", error);
    if (status == OSCAR_OK) fit_choice_finish(pass->choice, report);
    return status;
}

/* The day, as SOURCE_DATE_EPOCH says or the clock: the same day, the same bytes. */
static void today(char text[16]) {
    const char *fixed = getenv("SOURCE_DATE_EPOCH");
    time_t now = fixed ? (time_t)strtoll(fixed, NULL, 10) : time(NULL);
    struct tm day;
    gmtime_r(&now, &day);
    strftime(text, 16, "%Y-%m-%d", &day);
}

static oscar_status describe(oscar_rotations *rotations, const char *recipe, const struct llama_model *model,
                             const fit_options *options, const fit_report *report, oscar_error *error) {
    char tokens[32], hash[32], date[16], fingerprint[OSCAR_LLAMA_FINGERPRINT_SIZE];
    oscar_status status = oscar_llama_fingerprint(model, fingerprint, sizeof fingerprint);
    if (status != OSCAR_OK) return error_set(error, status, -1, "the model's fingerprint is too long");
    snprintf(tokens, sizeof tokens, "%lld", (long long)report->n_tokens);
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)report->text_hash);
    today(date);
    if (rotations_set_meta(rotations, "model", options->model_name) &&
        rotations_set_meta(rotations, "model_fingerprint", fingerprint) && rotations_set_meta(rotations, "recipe", recipe) && rotations_set_meta(rotations, "calibration_tokens", tokens) &&
        rotations_set_meta(rotations, "calibration_text", options->text_path ? "file" : "sampled") &&
        rotations_set_meta(rotations, "calibration_text_xxh64", hash) && rotations_set_meta(rotations, "calibration_date", date))
        return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for metadata");
}

oscar_status fit_model(struct llama_model *model, const fit_options *options, oscar_rotations **ours,
                       oscar_rotations **zoo, fit_report *report, oscar_error *error) {
    memset(report, 0, sizeof *report);
    *ours = NULL;
    oscar_rotations *published = NULL;
    fit_text text;
    fit_pass pass = {.options = options};
    oscar_status status = read_texts(model, options, &text, error);
    if (status != OSCAR_OK) return status;
    status = sum_pass(&pass, model, &text, report, error);
    if (status == OSCAR_OK) status = calib_fit(pass.sums, OSCAR_MAX_HEAD_DIM, ours, error);
    if (status == OSCAR_OK) status = calib_fit_zoo(pass.sums, &published, error);
    if (status == OSCAR_OK) status = choose(&pass, model, &text, *ours, published, report, error);
    if (status == OSCAR_OK) status = describe(*ours, "oscar", model, options, report, error);
    if (status == OSCAR_OK) status = describe(published, "oscar-zoo", model, options, report, error);
    end_pass(&pass);
    fit_text_free(&text);
    if (status != OSCAR_OK) no_rotations(ours);
    if (status != OSCAR_OK || !zoo) no_rotations(&published);
    if (zoo) *zoo = published;
    return status;
}

oscar_status fit_model_zoo(struct llama_model *model, const fit_options *options, oscar_rotations **zoo,
                           fit_report *report, oscar_error *error) {
    memset(report, 0, sizeof *report);
    *zoo = NULL;
    fit_text text;
    fit_pass pass = {.options = options};
    oscar_status status = read_texts(model, options, &text, error);
    if (status != OSCAR_OK) return status;
    status = sum_pass(&pass, model, &text, report, error);
    if (status == OSCAR_OK) status = calib_fit_zoo(pass.sums, zoo, error);
    if (status == OSCAR_OK) status = describe(*zoo, "oscar-zoo", model, options, report, error);
    end_pass(&pass);
    fit_text_free(&text);
    if (status != OSCAR_OK) no_rotations(zoo);
    return status;
}
