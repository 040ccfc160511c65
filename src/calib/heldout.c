/* Attention of one KV head on tokens that were not calibrated on, with and without quantisation. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "calib/calib.h"

#define MAX_QUERIES 64 /* tokens whose queries are sampled */

struct heldout {
    oscar_layer shape;
    int32_t head, n, g, sink, recent; /* n tokens, g query heads */
    int32_t n_queries;                /* sampled tokens */
    int32_t query_token[MAX_QUERIES];
    float scale, softcap;
    float sink_logit[OSCAR_MAX_GQA_GROUP]; /* -inf: none */
    float *k, *v;   /* [n, d] after RoPE */
    float *q;       /* [n_queries * g, d] after RoPE */
    float *logits;  /* [n_queries * g, n] q.k, not scaled */
    float *prob;    /* [n_queries * g, n] exact; 0 where the query does not see */
    float *out;     /* [n_queries * g, d] exact */
    float *work_n;  /* [n_queries * g, n] */
    float *work_q;  /* [n_queries * g, d] */
    float *work_e;  /* [n, d] */
};

void heldout_accumulate(heldout_error *sum, const heldout_error *part) {
    sum->logit_square += part->logit_square;
    sum->n_logits += part->n_logits;
    sum->attn_kl += part->attn_kl;
    sum->out_k += part->out_k;
    sum->out_v += part->out_v;
    sum->out_square += part->out_square;
    sum->n_queries += part->n_queries;
}

static int32_t first_visible(const heldout *h, int32_t t) {
    int32_t window = h->shape.window;
    return window > 0 && t - window + 1 > 0 ? t - window + 1 : 0;
}

/* Positions [*from, *to) are what the query at t sees quantised. */
static void history(const heldout *h, int32_t t, int32_t *from, int32_t *to) {
    int32_t first = first_visible(h, t);
    *from = first > h->sink ? first : h->sink;
    *to = t - h->recent + 1;
    if (*to < *from) *to = *from;
}

/* Softmax of one query row over [first, t], with the head's attention sink. delta [n] (NULL: none)
 * is added to the raw logits inside the history. prob [n]. */
static void softmax_row(const heldout *h, int32_t row, const float *delta, float *prob) {
    int32_t t = h->query_token[row / h->g], from, to;
    history(h, t, &from, &to);
    int32_t first = first_visible(h, t);
    const float *logits = h->logits + (size_t)row * (size_t)h->n;
    float sink = h->sink_logit[row % h->g], most = sink;
    memset(prob, 0, (size_t)h->n * sizeof *prob);
    for (int32_t j = first; j <= t; j++) {
        float x = logits[j] + (delta && j >= from && j < to ? delta[j] : 0);
        x *= h->scale;
        if (h->softcap > 0) x = h->softcap * tanhf(x / h->softcap);
        prob[j] = x;
        if (x > most) most = x;
    }
    double sum = isinf(sink) ? 0 : exp((double)(sink - most));
    for (int32_t j = first; j <= t; j++) {
        prob[j] = expf(prob[j] - most);
        sum += (double)prob[j];
    }
    float inverse = (float)(1 / sum);
    for (int32_t j = first; j <= t; j++) prob[j] *= inverse;
}

/* c [m, n] = a [m, k] b^T or b. */
static void product(bool transposed, size_t m, int32_t n, int32_t k, const float *a, const float *b, float *c) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, transposed ? CblasTrans : CblasNoTrans, (int)m, n, k, 1, a, k, b,
                transposed ? k : n, 0, c, n);
}

static bool heldout_alloc(heldout *h) {
    size_t rows = (size_t)h->n_queries * (size_t)h->g, n = (size_t)h->n, d = (size_t)h->shape.head_dim;
    h->k = aligned_calloc(n * d, sizeof(float));
    h->v = aligned_calloc(n * d, sizeof(float));
    h->q = aligned_calloc(rows * d, sizeof(float));
    h->logits = aligned_calloc(rows * n, sizeof(float));
    h->prob = aligned_calloc(rows * n, sizeof(float));
    h->out = aligned_calloc(rows * d, sizeof(float));
    h->work_n = aligned_calloc(rows * n, sizeof(float));
    h->work_q = aligned_calloc(rows * d, sizeof(float));
    h->work_e = aligned_calloc(n * d, sizeof(float));
    return h->k && h->v && h->q && h->logits && h->prob && h->out && h->work_n && h->work_q && h->work_e;
}

void heldout_free(heldout *h) {
    if (!h) return;
    aligned_free(h->k);
    aligned_free(h->v);
    aligned_free(h->q);
    aligned_free(h->logits);
    aligned_free(h->prob);
    aligned_free(h->out);
    aligned_free(h->work_n);
    aligned_free(h->work_q);
    aligned_free(h->work_e);
    free(h);
}

static bool heldout_read(heldout *h, const oscar_step *step) {
    size_t d = (size_t)h->shape.head_dim;
    for (int32_t t = 0; t < h->n; t++)
        if (!step_read_k(&h->shape, step, t, h->head, h->k + (size_t)t * d) ||
            !step_read_v(&h->shape, step, t, h->head, h->v + (size_t)t * d))
            return false;
    for (int32_t r = 0; r < h->n_queries * h->g; r++)
        if (!step_read_q(&h->shape, step, h->query_token[r / h->g], h->head * h->g + r % h->g, h->q + (size_t)r * d))
            return false;
    return true;
}

/* Queries spread over the tokens that have a history. */
static void sample_queries(heldout *h) {
    int32_t first = h->sink + h->recent, n = h->n - first;
    h->n_queries = n < MAX_QUERIES ? n : MAX_QUERIES;
    for (int32_t i = 0; i < h->n_queries; i++)
        h->query_token[i] = first + (int32_t)((int64_t)(i + 1) * n / h->n_queries) - 1;
}

oscar_status heldout_new(heldout **out, const oscar_layer *shape, const oscar_step *step, int32_t head, int32_t sink,
                         int32_t recent, oscar_error *error) {
    *out = NULL;
    if (step->n_tokens <= sink + recent)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "%d held-out tokens leave no history between windows of %d and %d",
                         step->n_tokens, sink, recent);
    heldout *h = calloc(1, sizeof *h);
    if (!h) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for held-out rows");
    h->shape = *shape;
    h->head = head;
    h->n = step->n_tokens;
    h->g = shape->n_q_heads / shape->n_kv_heads;
    h->sink = sink;
    h->recent = recent;
    h->scale = step->logit_scale;
    h->softcap = step->logit_softcap;
    sample_queries(h);
    for (int32_t i = 0; i < h->g; i++)
        h->sink_logit[i] = step->sink_logits ? step->sink_logits[head * h->g + i] : -INFINITY;
    if (!heldout_alloc(h)) {
        heldout_free(h);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d held-out rows", step->n_tokens);
    }
    if (!heldout_read(h, step)) {
        heldout_free(h);
        return error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "held-out rows of KV head %d hold NaN or infinity", head);
    }
    size_t rows = (size_t)h->n_queries * (size_t)h->g;
    product(true, rows, h->n, shape->head_dim, h->q, h->k, h->logits);
    for (size_t r = 0; r < rows; r++) softmax_row(h, (int32_t)r, NULL, h->prob + r * (size_t)h->n);
    product(false, rows, shape->head_dim, h->n, h->prob, h->v, h->out);
    *out = h;
    return OSCAR_OK;
}

/* Replaces the rows [n, d] by x^ - x in the rotated basis. */
static oscar_status quantisation_errors(const row_codec *codec, int32_t n, float *rows, oscar_error *error) {
    int32_t d = codec->head_dim, n_groups = d / codec->group;
    float y[CODEC_LANES * OSCAR_MAX_HEAD_DIM] __attribute__((aligned(64)));
    uint8_t codes[CODEC_LANES * OSCAR_MAX_HEAD_DIM] __attribute__((aligned(64)));
    uint16_t params[CODEC_LANES * CODEC_MAX_GROUPS * 2] __attribute__((aligned(64)));
    for (int32_t t = 0; t < n; t += CODEC_LANES) {
        int lanes = n - t < CODEC_LANES ? n - t : CODEC_LANES;
        float *x = rows + (size_t)t * (size_t)d;
        if (codec_quantize_rows(codec, lanes, x, d, y, codes, params) != 0)
            return error_set(error, OSCAR_ERROR_NOT_FINITE, t, "a held-out row left the range of floats when it was rotated");
        for (int i = 0; i < lanes; i++)
            for (int32_t j = 0; j < d; j++) {
                const uint16_t *p = params + (i * n_groups + j / codec->group) * 2;
                x[i * d + j] = fp16_to_float(p[1]) + fp16_to_float(p[0]) * (float)codes[i * d + j] - y[i * d + j];
            }
    }
    return OSCAR_OK;
}

static row_codec side_codec(const rotations_layer *layer, int32_t head, bool key) {
    int32_t d = layer->shape.head_dim;
    size_t row = (size_t)head * (size_t)d, square = row * (size_t)d;
    const float *b = key ? layer->k_metric_b : layer->v_metric_b, *dg = key ? layer->k_metric_d : layer->v_metric_d;
    const float *u = key ? layer->k_rotation : layer->v_rotation;
    row_codec codec = {
        .head_dim = d,
        .group = codec_group(d),
        .bits = key ? layer->bits_k : layer->bits_v,
        .recipe = layer->recipe,
        .clip = key ? layer->clip_k : layer->clip_v,
        .ldlq = key && layer->ldlq_k,
        .gain = key ? layer->gain_k : layer->gain_v,
        .metric_b = b ? b + square : NULL,
        .metric_d = dg ? dg + row : NULL,
        .rotation = u ? u + square : NULL,
    };
    return codec;
}

/* work_e = R_shift k_t - mu - R_{t + shift} nu, work_q = R_shift q. */
static void shifted_rows(heldout *h, const rotations_layer *layer, int32_t shift) {
    const oscar_rope *rope = &h->shape.rope;
    int32_t d = h->shape.head_dim;
    double shift_angles[OSCAR_MAX_HEAD_DIM], angles[OSCAR_MAX_HEAD_DIM];
    rope_angles(rope, shift, shift_angles);
    memcpy(h->work_q, h->q, (size_t)h->n_queries * (size_t)h->g * (size_t)d * sizeof(float));
    for (int32_t r = 0; shift != 0 && r < h->n_queries * h->g; r++)
        rope_turn(rope, shift_angles, false, h->work_q + (size_t)r * (size_t)d);
    for (int32_t t = 0; t < h->n; t++) {
        float *x = h->work_e + (size_t)t * (size_t)d, mean[OSCAR_MAX_HEAD_DIM];
        memcpy(x, h->k + (size_t)t * (size_t)d, (size_t)d * sizeof(float));
        if (shift != 0) rope_turn(rope, shift_angles, false, x);
        if (layer->n_tracked > 0) {
            memcpy(mean, layer->k_tracked + (size_t)h->head * (size_t)d, (size_t)d * sizeof(float));
            rope_angles(rope, t + shift, angles);
            rope_turn(rope, angles, false, mean);
            for (int32_t i = 0; i < rope->n_dims / 2; i++) {
                int32_t a = rope_first(rope, i), b = rope_second(rope, i);
                x[a] -= mean[a] * rope->magnitude;
                x[b] -= mean[b] * rope->magnitude;
            }
        }
        if (layer->k_mean)
            for (int32_t i = 0; i < d; i++) x[i] -= layer->k_mean[(size_t)h->head * (size_t)d + (size_t)i];
    }
}

/* Squared logit error and KL of one query row; delta: [n] raw logit errors, prob_hat: [n]. */
static void row_errors(const heldout *h, int32_t row, const float *delta, const float *prob_hat, heldout_error *sum) {
    int32_t from, to, t = h->query_token[row / h->g];
    const float *prob = h->prob + (size_t)row * (size_t)h->n;
    history(h, t, &from, &to);
    double square = 0, kl = 0;
    for (int32_t j = from; j < to; j++) {
        double x = (double)delta[j] * (double)h->scale;
        square += x * x;
    }
    for (int32_t j = first_visible(h, t); j <= t; j++) /* a vanished p^ is cut at e^-100 */
        if (prob[j] > 0) kl += (double)prob[j] * (double)(logf(prob[j]) - (prob_hat[j] > 0 ? logf(prob_hat[j]) : -100.0f));
    sum->logit_square += square;
    sum->n_logits += to - from;
    sum->attn_kl += kl;
}

static double square_sum(size_t n, const float *a, const float *b) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        double x = (double)a[i] - (b ? (double)b[i] : 0);
        sum += x * x;
    }
    return sum;
}

oscar_status heldout_keys(heldout *h, const rotations_layer *layer, int32_t shift, heldout_error *result, oscar_error *error) {
    int32_t d = h->shape.head_dim;
    size_t rows = (size_t)h->n_queries * (size_t)h->g;
    memset(result, 0, sizeof *result);
    row_codec codec = side_codec(layer, h->head, true);
    shifted_rows(h, layer, shift);
    oscar_status status = quantisation_errors(&codec, h->n, h->work_e, error);
    if (status != OSCAR_OK) return status;
    float *turned = aligned_calloc(rows * (size_t)d, sizeof *turned), *row = aligned_calloc((size_t)h->n, sizeof *row);
    if (!turned || !row) {
        aligned_free(turned);
        aligned_free(row);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %zu query rows", rows);
    }
    const float *q = h->work_q;
    if (codec.rotation) {
        product(false, rows, d, d, h->work_q, codec.rotation, turned);
        q = turned;
    }
    product(true, rows, h->n, d, q, h->work_e, h->work_n);
    for (size_t r = 0; r < rows; r++) {
        float *delta = h->work_n + r * (size_t)h->n;
        softmax_row(h, (int32_t)r, delta, row);
        row_errors(h, (int32_t)r, delta, row, result);
        memcpy(delta, row, (size_t)h->n * sizeof *row);
    }
    product(false, rows, d, h->n, h->work_n, h->v, h->work_q);
    result->out_k = square_sum(rows * (size_t)d, h->work_q, h->out);
    result->out_square = square_sum(rows * (size_t)d, h->out, NULL);
    result->n_queries = (double)rows;
    aligned_free(turned);
    aligned_free(row);
    return OSCAR_OK;
}

oscar_status heldout_values(heldout *h, const rotations_layer *layer, heldout_error *result, oscar_error *error) {
    int32_t d = h->shape.head_dim;
    size_t rows = (size_t)h->n_queries * (size_t)h->g, n = (size_t)h->n;
    memset(result, 0, sizeof *result);
    row_codec codec = side_codec(layer, h->head, false);
    memcpy(h->work_e, h->v, n * (size_t)d * sizeof(float));
    for (size_t t = 0; layer->v_mean && t < n; t++)
        for (int32_t i = 0; i < d; i++) h->work_e[t * (size_t)d + (size_t)i] -= layer->v_mean[h->head * d + i];
    oscar_status status = quantisation_errors(&codec, h->n, h->work_e, error);
    if (status != OSCAR_OK) return status;
    for (size_t r = 0; r < rows; r++) {
        int32_t from, to;
        history(h, h->query_token[r / (size_t)h->g], &from, &to);
        memset(h->work_n + r * n, 0, n * sizeof(float));
        memcpy(h->work_n + r * n + from, h->prob + r * n + from, (size_t)(to - from) * sizeof(float));
    }
    /* The rotation is orthogonal: the error has the same length in the rotated basis. */
    product(false, rows, d, h->n, h->work_n, h->work_e, h->work_q);
    result->out_v = square_sum(rows * (size_t)d, h->work_q, NULL);
    result->out_square = square_sum(rows * (size_t)d, h->out, NULL);
    result->n_queries = (double)rows;
    return OSCAR_OK;
}
