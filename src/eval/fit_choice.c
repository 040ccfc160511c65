/* Held-out measurements of a model, and the choices they make. */
#include "eval/fit_choice.h"

#include <pthread.h>
#include <stdlib.h>

/* The chosen number of tracked pairs may lose this much against the best. */
#define TRACKED_SLACK 1.05
/* Gain stays on unless it costs a layer this many times the output error. The error of one layer
 * alone favours rows that quantisation has shortened, but that loss has the same sign in all of
 * them and adds up over layers: deciding by the smaller error took gain from half the layers of
 * SmolLM2, and the model's KL rose from .029 to .038. */
#define GAIN_HARM 1.5
#define MAX_SHIFTS 3
#define MAX_BITS 4

/* Second run, one layer. Index of gain: 0 off, 1 on; of bits: 2, 3, 4. */
typedef struct layer_trial {
    heldout_error key[2];           /* 2 bits, by gain */
    heldout_error value[2];
    heldout_error key_bits[MAX_BITS + 1];   /* with gain, 3 and 4 bits */
    heldout_error value_bits[MAX_BITS + 1];
    heldout_error zoo_key, zoo_value;
} layer_trial;

struct fit_choice {
    const calib *sums;
    oscar_rotations *ours;
    const oscar_rotations *zoo;
    fit_choice_options options;
    int run; /* 1, 2 */
    int32_t n_layers;
    int32_t n_shifts, shift[MAX_SHIFTS];
    int32_t n_candidates, candidate[FIT_MAX_CANDIDATES];
    heldout_error *tracked; /* [n_layers, FIT_MAX_CANDIDATES] */
    layer_trial *trial;     /* [n_layers] */
    double candidate_error[FIT_MAX_CANDIDATES];
    int32_t n_tracked, n_pairs_max;
};

/* Multiples of 8 up to the number of pairs, in steps that grow so that there are few. */
static void list_candidates(fit_choice *c) {
    int32_t fixed = c->options.n_tracked, n = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        int32_t pairs = c->sums->layers[i].rope.n_dims / 2;
        if (pairs > c->n_pairs_max) c->n_pairs_max = pairs;
    }
    if (fixed >= 0) {
        c->candidate[n++] = fixed < c->n_pairs_max ? fixed : c->n_pairs_max;
    } else {
        for (int32_t pairs = 0; pairs < c->n_pairs_max && n + 1 < FIT_MAX_CANDIDATES;
             pairs += pairs < 32 ? 8 : pairs < 64 ? 16 : 32)
            c->candidate[n++] = pairs;
        c->candidate[n++] = c->n_pairs_max;
    }
    c->n_candidates = n;
}

static void list_shifts(fit_choice *c) {
    int32_t far = c->options.context - FIT_HELDOUT_TOKENS;
    c->n_shifts = 1;
    if (far < FIT_HELDOUT_TOKENS) return;
    c->shift[c->n_shifts++] = far / 4;
    c->shift[c->n_shifts++] = far;
}

oscar_status fit_choice_new(fit_choice **out, const calib *sums, oscar_rotations *ours, const oscar_rotations *zoo,
                            const fit_choice_options *options, oscar_error *error) {
    *out = NULL;
    fit_choice *c = calloc(1, sizeof *c);
    if (!c) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for held-out measurements");
    c->sums = sums;
    c->ours = ours;
    c->zoo = zoo;
    c->options = *options;
    c->run = 1;
    c->n_layers = sums->n_layers;
    c->tracked = calloc((size_t)c->n_layers * FIT_MAX_CANDIDATES, sizeof *c->tracked);
    c->trial = calloc((size_t)c->n_layers, sizeof *c->trial);
    if (!c->tracked || !c->trial) {
        fit_choice_free(c);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for held-out measurements");
    }
    list_candidates(c);
    list_shifts(c);
    *out = c;
    return OSCAR_OK;
}

void fit_choice_free(fit_choice *c) {
    if (!c) return;
    free(c->tracked);
    free(c->trial);
    free(c);
}

static oscar_status try_keys(heldout *h, const rotations_layer *layer, int32_t shift, heldout_error *sum, oscar_error *error) {
    heldout_error part;
    oscar_status status = heldout_keys(h, layer, shift, &part, error);
    if (status == OSCAR_OK) heldout_accumulate(sum, &part);
    return status;
}

static oscar_status try_values(heldout *h, const rotations_layer *layer, heldout_error *sum, oscar_error *error) {
    heldout_error part;
    oscar_status status = heldout_values(h, layer, &part, error);
    if (status == OSCAR_OK) heldout_accumulate(sum, &part);
    return status;
}

/* One head's part of a layer, measured by one thread: sums are added up afterwards, in the order of
 * heads, so that they do not depend on the threads. */
typedef struct head_trial {
    heldout *rows;
    heldout_error tracked; /* first run: one candidate, all shifts */
    layer_trial trial;     /* second run */
    oscar_status status;
    oscar_error error;
} head_trial;

/* A layer in flight. */
typedef struct layer_job {
    fit_choice *choice;
    int32_t layer, n_heads;
    const oscar_step *step;
    head_trial *heads; /* [n_heads] */
    void (*measure)(struct layer_job *job, int32_t head);
    int32_t ith, n_threads;
} layer_job;

static void read_rows(layer_job *job, int32_t head) {
    const fit_choice *c = job->choice;
    head_trial *t = &job->heads[head];
    t->status = heldout_new(&t->rows, &c->sums->layers[job->layer], job->step, head, c->options.sink, c->options.recent, &t->error);
}

/* First run: the number of pairs that the layer has now, near and far. */
static void measure_tracked(layer_job *job, int32_t head) {
    fit_choice *c = job->choice;
    head_trial *t = &job->heads[head];
    memset(&t->tracked, 0, sizeof t->tracked);
    for (int32_t s = 0; s < c->n_shifts && t->status == OSCAR_OK; s++)
        t->status = try_keys(t->rows, &c->ours->layers[job->layer], c->shift[s], &t->tracked, &t->error);
}

/* Second run: gain off and on, and more bits where there is a budget for them. */
static void measure_gain_and_bits(layer_job *job, int32_t head) {
    const fit_choice *c = job->choice;
    rotations_layer probe = c->ours->layers[job->layer]; /* shares the arrays */
    head_trial *h = &job->heads[head];
    layer_trial *trial = &h->trial;
    for (int gain = 0; gain < 2 && h->status == OSCAR_OK; gain++) {
        probe.gain_k = probe.gain_v = gain == 1;
        h->status = try_keys(h->rows, &probe, 0, &trial->key[gain], &h->error);
        if (h->status == OSCAR_OK) h->status = try_values(h->rows, &probe, &trial->value[gain], &h->error);
    }
    for (int32_t bits = 3; bits <= MAX_BITS && c->options.bits_budget > 2 && h->status == OSCAR_OK; bits++) {
        probe.bits_k = probe.bits_v = bits;
        h->status = try_keys(h->rows, &probe, 0, &trial->key_bits[bits], &h->error);
        if (h->status == OSCAR_OK) h->status = try_values(h->rows, &probe, &trial->value_bits[bits], &h->error);
    }
    const rotations_layer *zoo = &c->zoo->layers[job->layer];
    if (h->status == OSCAR_OK) h->status = try_keys(h->rows, zoo, 0, &trial->zoo_key, &h->error);
    if (h->status == OSCAR_OK) h->status = try_values(h->rows, zoo, &trial->zoo_value, &h->error);
}

static void *run_heads(void *argument) {
    layer_job *job = argument;
    for (int32_t head = job->ith; head < job->n_heads; head += job->n_threads) job->measure(job, head);
    return NULL;
}

/* `measure` for every head; the first failure. */
static oscar_status for_heads(const layer_job *job, void (*measure)(layer_job *, int32_t), oscar_error *error) {
    enum { MAX_THREADS = 64 };
    pthread_t threads[MAX_THREADS];
    layer_job jobs[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    int32_t n_threads = job->choice->options.n_threads;
    if (n_threads > job->n_heads) n_threads = job->n_heads;
    if (n_threads > MAX_THREADS) n_threads = MAX_THREADS;
    if (n_threads < 1) n_threads = 1;
    for (int32_t i = n_threads - 1; i >= 0; i--) {
        jobs[i] = *job;
        jobs[i].measure = measure;
        jobs[i].ith = i;
        jobs[i].n_threads = n_threads;
        started[i] = i > 0 && pthread_create(&threads[i], NULL, run_heads, &jobs[i]) == 0;
        if (!started[i]) run_heads(&jobs[i]);
    }
    for (int32_t i = 1; i < n_threads; i++)
        if (started[i]) pthread_join(threads[i], NULL);
    for (int32_t head = 0; head < job->n_heads; head++) {
        const head_trial *t = &job->heads[head];
        if (t->status != OSCAR_OK) return error_set(error, t->status, t->error.position, "layer %d, KV head %d: %.180s", job->layer, head, t->error.message);
    }
    return OSCAR_OK;
}

static oscar_status try_tracked(const layer_job *job, oscar_error *error) {
    fit_choice *c = job->choice;
    oscar_status status = OSCAR_OK;
    for (int32_t i = 0; i < c->n_candidates && status == OSCAR_OK; i++) {
        status = calib_set_tracked(c->sums, job->layer, c->candidate[i], &c->ours->layers[job->layer], error);
        if (status == OSCAR_OK) status = for_heads(job, measure_tracked, error);
        for (int32_t head = 0; head < job->n_heads && status == OSCAR_OK; head++)
            heldout_accumulate(&c->tracked[job->layer * FIT_MAX_CANDIDATES + i], &job->heads[head].tracked);
    }
    return status;
}

static oscar_status try_gain_and_bits(const layer_job *job, oscar_error *error) {
    oscar_status status = for_heads(job, measure_gain_and_bits, error);
    layer_trial *sum = &job->choice->trial[job->layer];
    for (int32_t head = 0; head < job->n_heads && status == OSCAR_OK; head++) {
        const layer_trial *part = &job->heads[head].trial;
        for (int gain = 0; gain < 2; gain++) {
            heldout_accumulate(&sum->key[gain], &part->key[gain]);
            heldout_accumulate(&sum->value[gain], &part->value[gain]);
        }
        for (int32_t bits = 3; bits <= MAX_BITS; bits++) {
            heldout_accumulate(&sum->key_bits[bits], &part->key_bits[bits]);
            heldout_accumulate(&sum->value_bits[bits], &part->value_bits[bits]);
        }
        heldout_accumulate(&sum->zoo_key, &part->zoo_key);
        heldout_accumulate(&sum->zoo_value, &part->zoo_value);
    }
    return status;
}

oscar_status fit_choice_observe(fit_choice *c, int32_t layer, const oscar_step *step, oscar_error *error) {
    if (step->positions[0] != 0)
        return error_set(error, OSCAR_ERROR_INTERNAL, -1, "a held-out chunk came in parts (position %d first)", step->positions[0]);
    layer_job job = {.choice = c, .layer = layer, .n_heads = c->sums->layers[layer].n_kv_heads, .step = step};
    job.heads = calloc((size_t)job.n_heads, sizeof *job.heads);
    if (!job.heads) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d heads", job.n_heads);
    oscar_status status = for_heads(&job, read_rows, error);
    if (status == OSCAR_OK) status = c->run == 1 ? try_tracked(&job, error) : try_gain_and_bits(&job, error);
    for (int32_t head = 0; head < job.n_heads; head++) heldout_free(job.heads[head].rows);
    free(job.heads);
    return status;
}

static double ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }
static double key_error(const heldout_error *e) { return ratio(e->out_k, e->out_square); }
static double value_error(const heldout_error *e) { return ratio(e->out_v, e->out_square); }

oscar_status fit_choice_next(fit_choice *c, oscar_error *error) {
    double best = 0;
    for (int32_t i = 0; i < c->n_candidates; i++) {
        double sum = 0;
        for (int32_t l = 0; l < c->n_layers; l++) sum += key_error(&c->tracked[l * FIT_MAX_CANDIDATES + i]);
        c->candidate_error[i] = sum / c->n_layers;
        if (i == 0 || c->candidate_error[i] < best) best = c->candidate_error[i];
    }
    int32_t chosen = 0;
    while (c->candidate_error[chosen] > best * TRACKED_SLACK) chosen++;
    c->n_tracked = c->candidate[chosen];
    c->run = 2;
    oscar_status status = OSCAR_OK;
    for (int32_t l = 0; l < c->n_layers && status == OSCAR_OK; l++)
        status = calib_set_tracked(c->sums, l, c->n_tracked, &c->ours->layers[l], error);
    return status;
}

/* One more bit for one side of one layer. */
typedef struct bit_step {
    int32_t layer;
    bool key;
    double value; /* error removed for each bit of storage */
} bit_step;

static bit_step best_bit_step(const fit_choice *c, double budget_left) {
    bit_step best = {-1, false, 0};
    for (int32_t i = 0; i < 2 * c->n_layers; i++) {
        int32_t l = i / 2;
        bool key = i % 2 == 0;
        const rotations_layer *fitted = &c->ours->layers[l];
        const layer_trial *t = &c->trial[l];
        double elements = (double)fitted->shape.n_kv_heads * fitted->shape.head_dim;
        int32_t bits = key ? fitted->bits_k : fitted->bits_v;
        if (bits >= MAX_BITS || elements > budget_left) continue;
        double now = key ? key_error(bits == 2 ? &t->key[1] : &t->key_bits[bits])
                         : value_error(bits == 2 ? &t->value[1] : &t->value_bits[bits]);
        double then = key ? key_error(&t->key_bits[bits + 1]) : value_error(&t->value_bits[bits + 1]);
        if ((now - then) / elements > best.value) best = (bit_step){l, key, (now - then) / elements};
    }
    return best;
}

/* Greedy: the largest error removed for each bit, until the budget is spent. */
static void spend_bits(fit_choice *c, fit_report *report) {
    double elements = 0;
    for (int32_t l = 0; l < c->n_layers; l++)
        elements += 2.0 * c->ours->layers[l].shape.n_kv_heads * c->ours->layers[l].shape.head_dim;
    double spent = 0, budget = (c->options.bits_budget - 2) * elements;
    for (;;) {
        bit_step step = best_bit_step(c, budget - spent);
        if (step.layer < 0) break;
        rotations_layer *fitted = &c->ours->layers[step.layer];
        if (step.key) {
            fitted->bits_k++;
            fitted->gain_k = true;
        } else {
            fitted->bits_v++;
            fitted->gain_v = true;
        }
        spent += (double)fitted->shape.n_kv_heads * fitted->shape.head_dim;
    }
    report->code_bits = 2 + spent / elements;
    for (int32_t l = 0; l < c->n_layers; l++)
        report->n_more_bits += (c->ours->layers[l].bits_k > 2) + (c->ours->layers[l].bits_v > 2);
}

static void add_error(fit_error *sum, const heldout_error *key, const heldout_error *value, int32_t n_layers) {
    sum->logit_square += ratio(key->logit_square, key->n_logits) / n_layers;
    sum->attn_kl += ratio(key->attn_kl, key->n_queries) / n_layers;
    sum->out_k += key_error(key) / n_layers;
    sum->out_v += value_error(value) / n_layers;
}

void fit_choice_finish(fit_choice *c, fit_report *report) {
    report->n_layers = c->n_layers;
    report->context = c->options.context;
    report->n_tracked = c->n_tracked;
    report->n_pairs_max = c->n_pairs_max;
    report->n_candidates = c->n_candidates;
    memcpy(report->candidate, c->candidate, sizeof report->candidate);
    memcpy(report->candidate_error, c->candidate_error, sizeof report->candidate_error);
    for (int32_t l = 0; l < c->n_layers; l++) {
        rotations_layer *fitted = &c->ours->layers[l];
        layer_trial *t = &c->trial[l];
        fitted->gain_k = t->key[1].out_k <= GAIN_HARM * t->key[0].out_k;
        fitted->gain_v = t->value[1].out_v <= GAIN_HARM * t->value[0].out_v;
        report->n_gain_k += fitted->gain_k;
        report->n_gain_v += fitted->gain_v;
        report->tracked_cost += 2.0 * fitted->n_tracked / fitted->shape.head_dim / c->n_layers;
    }
    spend_bits(c, report);
    for (int32_t l = 0; l < c->n_layers; l++) {
        const rotations_layer *fitted = &c->ours->layers[l];
        const layer_trial *t = &c->trial[l];
        const heldout_error *key = fitted->bits_k > 2 ? &t->key_bits[fitted->bits_k] : &t->key[fitted->gain_k];
        const heldout_error *value = fitted->bits_v > 2 ? &t->value_bits[fitted->bits_v] : &t->value[fitted->gain_v];
        add_error(&report->ours, key, value, c->n_layers);
        add_error(&report->zoo, &t->zoo_key, &t->zoo_value, c->n_layers);
    }
}
