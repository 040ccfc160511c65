/* Contexts in lockstep over the chunks of a text. */
#include "eval/compare.h"

#include <math.h>
#include <stdlib.h>

#include "eval/methods.h"
#include "eval/runner.h"

/* Tokens of a batch, less where a vocabulary is large: logits of a batch stay below 128 MiB. */
#define BATCH_TOKENS 512
#define BATCH_LOGITS_BYTES (128 << 20)

/* What one method has summed up. */
typedef struct tally {
    runner runner;
    oscar_rotations *own; /* rotations made for this method */
    double kl, nll;
    int64_t top1;
    float *kl_each; /* [n_scored] */
    compare_result *result;
} tally;

typedef struct comparison {
    const compare_options *options;
    struct llama_model *model;
    int32_t n_vocab, context, n_batch;
    runner exact;
    kl_reference reference;
    kl_row *rows;        /* [n_batch] */
    int8_t *with_logits; /* [n_batch] */
    int32_t *targets;    /* [n_batch] */
    double exact_nll;
    int64_t n_scored, n_total;
    tally tally[COMPARE_MAX_METHODS];
} comparison;

static int32_t batch_tokens(int32_t n_vocab) {
    int64_t n = BATCH_LOGITS_BYTES / ((int64_t)n_vocab * (int64_t)sizeof(float));
    if (n >= BATCH_TOKENS) return BATCH_TOKENS;
    return n >= 64 ? (int32_t)(n / 64 * 64) : 64;
}

static oscar_status start_exact(comparison *c, runner *r, oscar_error *error) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    return runner_init(r, c->model, c->context, c->n_batch, c->options->n_threads, &options, error);
}

/* The geometry, from an exact context that has seen a token. It belongs to the runner. */
static oscar_status learn_layers(comparison *c, runner *r, const oscar_layer **layers, int32_t *n_layers, oscar_error *error) {
    oscar_status status = runner_decode(r, 1, c->options->text->token[0], 0, NULL, error);
    if (status != OSCAR_OK) return status;
    *layers = oscar_llama_layers(r->layer, n_layers);
    runner_clear(r);
    return OSCAR_OK;
}

static oscar_status start_method(comparison *c, int32_t i, const oscar_layer *layers, int32_t n_layers, oscar_error *error) {
    const compare_method *method = &c->options->methods[i];
    tally *t = &c->tally[i];
    t->kl_each = malloc((size_t)c->n_total * sizeof *t->kl_each);
    if (!t->kl_each) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %lld positions", (long long)c->n_total);
    if (method->kind == METHOD_EXACT) return start_exact(c, &t->runner, error);
    oscar_status status = method_rotations(method, layers, n_layers, &t->own, error);
    if (status != OSCAR_OK) return status;
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.rotations = method->kind == METHOD_INT2 ? c->options->rotations : method->kind == METHOD_ZOO ? c->options->zoo : t->own;
    if (!options.rotations)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "method %s needs a rotation file", method->name);
    options.sink = method->sink >= 0 ? method->sink : c->options->sink;
    options.recent = method->recent >= 0 ? method->recent : c->options->recent;
    if (method->kind == METHOD_BF16) options.recent = c->context;
    options.bits_k = method->bits_k;
    options.bits_v = method->bits_v;
    options.baseline = method->kind == METHOD_KIVI ? OSCAR_LLAMA_BASELINE_KIVI : OSCAR_LLAMA_BASELINE_NONE;
    return runner_init(&t->runner, c->model, c->context, c->n_batch, c->options->n_threads, &options, error);
}

static oscar_status comparison_start(comparison *c, oscar_error *error) {
    const oscar_layer *layers = NULL;
    int32_t n_layers = 0;
    size_t n = (size_t)c->n_batch;
    c->rows = calloc(n, sizeof *c->rows);
    c->with_logits = calloc(n, sizeof *c->with_logits);
    c->targets = calloc(n, sizeof *c->targets);
    if (!c->rows || !c->with_logits || !c->targets || !kl_reference_init(&c->reference, c->n_vocab, c->n_batch))
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d rows of %d logits", c->n_batch, c->n_vocab);
    oscar_status status = start_exact(c, &c->exact, error);
    if (status == OSCAR_OK) status = learn_layers(c, &c->exact, &layers, &n_layers, error);
    for (int32_t i = 0; i < c->options->n_methods && status == OSCAR_OK; i++) status = start_method(c, i, layers, n_layers, error);
    /* Perplexities alone: the exact context has told the geometry. */
    if (status == OSCAR_OK && !c->options->exact_baseline) runner_destroy(&c->exact);
    return status;
}

static void comparison_end(comparison *c) {
    for (int32_t i = 0; i < COMPARE_MAX_METHODS; i++) {
        runner_destroy(&c->tally[i].runner);
        oscar_rotations_free(c->tally[i].own);
        free(c->tally[i].kl_each);
    }
    runner_destroy(&c->exact);
    kl_reference_destroy(&c->reference);
    free(c->rows);
    free(c->with_logits);
    free(c->targets);
}

static oscar_status add_rows(comparison *c, int32_t i, int32_t n, oscar_error *error) {
    tally *t = &c->tally[i];
    for (int32_t r = 0; r < n; r++) {
        if (!c->rows[r].finite)
            return error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "method %s: logits hold NaN or infinity", c->options->methods[i].name);
        t->kl += c->rows[r].kl;
        t->nll += c->rows[r].nll;
        t->top1 += c->rows[r].top1;
        t->kl_each[c->n_scored + r] = (float)c->rows[r].kl;
    }
    return OSCAR_OK;
}

/* Scores the n rows that the exact context has just computed, in every method. */
static oscar_status score_batch(comparison *c, const int32_t *tokens, int32_t n, int32_t position, int32_t n_rows, oscar_error *error) {
    int32_t n_threads = c->options->n_threads;
    if (c->options->exact_baseline && n_rows > 0) {
        kl_set_reference(&c->reference, n_rows, llama_get_logits(c->exact.ctx), c->targets, n_threads, c->rows);
        for (int32_t r = 0; r < n_rows; r++) {
            if (!c->rows[r].finite) return error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "the exact model's logits hold NaN or infinity");
            c->exact_nll += c->rows[r].nll;
        }
    }
    for (int32_t i = 0; i < c->options->n_methods; i++) {
        tally *t = &c->tally[i];
        oscar_status status = runner_decode(&t->runner, n, tokens, position, c->with_logits, error);
        if (status != OSCAR_OK) return status;
        if (n_rows == 0) continue;
        const float *logits = llama_get_logits(t->runner.ctx);
        if (c->options->exact_baseline) kl_compare(&c->reference, logits, c->targets, n_threads, c->rows);
        else kl_set_reference(&c->reference, n_rows, logits, c->targets, n_threads, c->rows);
        status = add_rows(c, i, n_rows, error);
        if (status != OSCAR_OK) return status;
    }
    c->n_scored += n_rows;
    return OSCAR_OK;
}

static oscar_status run_chunk(comparison *c, int32_t chunk, oscar_error *error) {
    const int32_t *tokens = c->options->text->token[chunk];
    oscar_status status = OSCAR_OK;
    if (c->options->exact_baseline) runner_clear(&c->exact);
    for (int32_t i = 0; i < c->options->n_methods; i++) runner_clear(&c->tally[i].runner);
    for (int32_t t = 0; t < c->context && status == OSCAR_OK; t += c->n_batch) {
        int32_t n = c->context - t < c->n_batch ? c->context - t : c->n_batch, n_rows = 0;
        for (int32_t i = 0; i < n; i++) {
            c->with_logits[i] = t + i >= c->options->skip && t + i + 1 < c->context;
            if (c->with_logits[i]) c->targets[n_rows++] = tokens[t + i + 1];
        }
        if (c->options->exact_baseline) status = runner_decode(&c->exact, n, tokens + t, t, c->with_logits, error);
        if (status == OSCAR_OK) status = score_batch(c, tokens + t, n, t, n_rows, error);
        if (c->options->progress)
            c->options->progress(c->options->user, "comparing", (int64_t)chunk * c->context + t + n,
                                 (int64_t)c->options->text->n_chunks * c->context);
    }
    return status;
}

/* Bits an element, counted from what the cache holds at the end of a chunk. */
static void count_bits(comparison *c, int32_t i) {
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(oscar_llama_cache(c->tally[i].runner.layer), &stats);
    compare_result *result = c->tally[i].result;
    double elements = (double)stats.exact_bytes_per_token / 2, tokens = c->context;
    double overlay = 8.0 * (double)(stats.overlay_pages_live * stats.overlay_page_bytes) / (elements * tokens);
    double history = 8.0 * (double)(stats.pages_live * stats.page_bytes) / (elements * tokens);
    result->bits = stats.history_bits;
    /* A simulated baseline holds float32 rows: what it would take stands in history_bits. */
    bool simulated = c->options->methods[i].kind == METHOD_KIVI;
    result->bits_windows = (simulated ? stats.history_bits : history) + overlay;
    if (c->options->methods[i].kind == METHOD_BF16) result->bits = result->bits_windows = 16; /* no query reads the codes */
}

static void finish(comparison *c, compare_report *report) {
    double n = (double)c->n_scored;
    report->n_scored = c->n_scored;
    report->exact_ppl = c->options->exact_baseline ? exp(c->exact_nll / n) : 0;
    for (int32_t i = 0; i < c->options->n_methods; i++) {
        tally *t = &c->tally[i];
        t->result->kl = t->kl / n;
        t->result->kl_p99 = kl_quantile(t->kl_each, c->n_scored, 0.99);
        t->result->ppl = exp(t->nll / n);
        t->result->top1 = (double)t->top1 / n;
        count_bits(c, i);
    }
}

oscar_status compare_run(struct llama_model *model, const compare_options *options, compare_report *report, oscar_error *error) {
    memset(report, 0, sizeof *report);
    int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    comparison c = {.options = options, .model = model, .n_vocab = n_vocab, .context = options->text->length[0]};
    int32_t per_chunk = c.context - 1 - options->skip;
    if (per_chunk < 1 || options->text->n_chunks < 1)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "nothing to score: chunks of %d tokens, the first %d skipped", c.context, options->skip);
    c.n_batch = batch_tokens(n_vocab);
    c.n_total = (int64_t)per_chunk * options->text->n_chunks;
    for (int32_t i = 0; i < options->n_methods; i++) c.tally[i].result = &report->method[i];
    oscar_status status = comparison_start(&c, error);
    for (int32_t chunk = 0; chunk < options->text->n_chunks && status == OSCAR_OK; chunk++) status = run_chunk(&c, chunk, error);
    if (status == OSCAR_OK) finish(&c, report);
    comparison_end(&c);
    return status;
}
