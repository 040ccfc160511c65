/* `oscar calibrate`: fit rotations for a model. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/phases.h"
#include "eval/fit_model.h"
#include "eval/runner.h"
#include "oscar/oscar.h"

typedef struct calibrate_options {
    const char *output, *text, *recipe, *zoo_output;
    int64_t tokens, context, pairs, seed, threads, gpu_layers;
    double bits_budget;
    bool json;
} calibrate_options;

static void print_row(const char *name, const fit_error *e) {
    fprintf(stderr, "  %-18s %12.4f %12.4f %12.4f %12.4f\n", name, sqrt(e->logit_square), e->attn_kl, e->out_k, e->out_v);
}

/* What was chosen and why, for people. */
static void print_report(const fit_report *r, const char *output, bool full) {
    fprintf(stderr, "calibrated on %lld tokens", (long long)r->n_tokens);
    if (!full) {
        fprintf(stderr, ": %s\n", output);
        return;
    }
    fprintf(stderr, ", chosen on %lld others, for texts of up to %d tokens: %s\n", (long long)r->n_heldout, r->context, output);
    fprintf(stderr, "  tracked pairs: %d of %d (%.0f %% more work for a key's logit); error by number:", r->n_tracked,
            r->n_pairs_max, 100 * r->tracked_cost);
    for (int32_t i = 0; i < r->n_candidates; i++) fprintf(stderr, " %d: %.4f", r->candidate[i], r->candidate_error[i]);
    fprintf(stderr, "\n  gain correction: keys of %d, values of %d of %d layers; code bits: %.3f (%d sides above 2)\n", r->n_gain_k,
            r->n_gain_v, r->n_layers, r->code_bits, r->n_more_bits);
    fprintf(stderr, "held out, mean over layers:\n  %-18s %12s %12s %12s %12s\n", "recipe", "logit error", "attention KL",
            "output, K", "output, V");
    print_row("published OSCAR", &r->zoo);
    print_row("this file", &r->ours);
}

static json_t *error_json(const fit_error *e) {
    return json_pack("{s:f,s:f,s:f,s:f}", "logit_error", sqrt(e->logit_square), "attention_kl", e->attn_kl, "output_error_k",
                     e->out_k, "output_error_v", e->out_v);
}

static json_t *report_json(const fit_report *r, const char *model, const char *output, bool full) {
    json_t *out = json_pack("{s:s,s:s,s:I,s:i}", "model", model, "output", output, "tokens", (json_int_t)r->n_tokens, "layers",
                            (int)r->n_layers);
    if (!out || !full) return out;
    json_t *tried = json_object();
    for (int32_t i = 0; i < r->n_candidates; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", r->candidate[i]);
        json_object_set_new(tried, key, json_real(r->candidate_error[i]));
    }
    json_object_set_new(out, "heldout_tokens", json_integer(r->n_heldout));
    json_object_set_new(out, "context", json_integer(r->context));
    json_object_set_new(out, "tracked_pairs", json_integer(r->n_tracked));
    json_object_set_new(out, "tracked_cost", json_real(r->tracked_cost));
    json_object_set_new(out, "tracked_tried", tried);
    json_object_set_new(out, "gain_k_layers", json_integer(r->n_gain_k));
    json_object_set_new(out, "gain_v_layers", json_integer(r->n_gain_v));
    json_object_set_new(out, "code_bits", json_real(r->code_bits));
    json_object_set_new(out, "published", error_json(&r->zoo));
    json_object_set_new(out, "ours", error_json(&r->ours));
    return out;
}

static int save(oscar_rotations *rotations, const char *path) {
    oscar_error error = {0};
    if (!path || oscar_rotations_save(rotations, path, &error) == OSCAR_OK) return CLI_CONTINUE;
    return cli_error("%s", error.message);
}

/* Refuses what cannot be written before minutes of work go into it. */
static int check_writable(const char *path) {
    if (!path) return CLI_CONTINUE;
    char probe[CLI_PATH_MAX + 32];
    snprintf(probe, sizeof probe, "%s.writable", path);
    FILE *file = fopen(probe, "wb");
    if (!file) return cli_error("cannot write %s", path);
    fclose(file);
    remove(probe);
    return CLI_CONTINUE;
}

static int calibrate(const calibrate_options *o, const char *model_name, const char *model_path, const char *output) {
    oscar_error error = {0};
    struct llama_model *model;
    bool zoo_alone = strcmp(o->recipe, "zoo") == 0;
    const char *slash = strrchr(model_path, '/');
    fit_options options = {
        .model_name = slash ? slash + 1 : model_path,
        .text_path = o->text,
        .n_tokens = o->tokens,
        .context = (int32_t)o->context,
        .n_tracked = o->pairs < 0 ? -1 : (int32_t)o->pairs,
        .bits_budget = o->bits_budget,
        .n_threads = runner_threads(o->threads),
        .seed = (uint64_t)o->seed,
        .progress = phases_show,
        .warn = phases_warn,
    };
    if (runner_load_model(&model, model_path, (int32_t)o->gpu_layers, &error) != OSCAR_OK) return cli_error("%s", error.message);
    oscar_rotations *ours = NULL, *zoo = NULL;
    fit_report report;
    oscar_status status = zoo_alone ? fit_model_zoo(model, &options, &zoo, &report, &error)
                                    : fit_model(model, &options, &ours, o->zoo_output ? &zoo : NULL, &report, &error);
    phases_end();
    llama_model_free(model);
    if (status != OSCAR_OK) return cli_error("%s", error.message);
    int stop = save(zoo_alone ? zoo : ours, output);
    if (stop == CLI_CONTINUE && !zoo_alone) stop = save(zoo, o->zoo_output);
    oscar_rotations_free(ours);
    oscar_rotations_free(zoo);
    if (stop != CLI_CONTINUE) return stop;
    print_report(&report, output, !zoo_alone);
    return o->json ? cli_print_json(report_json(&report, model_name, output, !zoo_alone)) : CLI_OK;
}

int cmd_calibrate(int argc, char **argv) {
    calibrate_options o = {.tokens = FIT_TOKENS_DEFAULT, .pairs = -1, .seed = 1, .recipe = "oscar"};
    const cli_option options[] = {
        {"output", 'o', CLI_STRING, &o.output, "FILE", "where to write the rotations (default: the cache folder,\nwhere `oscar run` finds them)"},
        {"text", 0, CLI_STRING, &o.text, "FILE", "UTF-8 text to calibrate on; chunks are taken from all its\nparts (default: the model writes its own)"},
        {"tokens", 'n', CLI_INT, &o.tokens, "N", "tokens to calibrate on (default 32768)"},
        {"context", 0, CLI_INT, &o.context, "N", "longest text the cache will hold, for the choice of\ntracked pairs (default: the trained context, up to 32768)"},
        {"pairs", 0, CLI_INT, &o.pairs, "N", "tracked rotary pairs (default: chosen on held-out tokens)"},
        {"bits-budget", 0, CLI_DOUBLE, &o.bits_budget, "B", "average bits of a code, such as 2.1: the layers that\nlose most get 3 or 4 bits (default 2)"},
        {"recipe", 0, CLI_STRING, &o.recipe, "oscar|zoo", "oscar (default), or zoo: the published recipe, to compare"},
        {"zoo-output", 0, CLI_STRING, &o.zoo_output, "FILE", "write the published recipe of the same statistics too"},
        {"seed", 0, CLI_INT, &o.seed, "N", "seed of the text that the model writes (default 1)"},
        {"threads", 't', CLI_INT, &o.threads, "N", "threads (default: all cores)"},
        CLI_GPU_LAYERS_OPTION(&o.gpu_layers),
        {"json", 0, CLI_FLAG, &o.json, NULL, "print what was chosen as JSON"},
    };
    const cli_spec spec = {
        "calibrate", "MODEL [-o FILE] [--text FILE] [options]",
        "Fits the rotations that a model's 2-bit cache uses. MODEL is a GGUF file or a name\n"
        "that `oscar pull` knows. Once for each model; a minute for a small one. Text like what\n"
        "the model will read is best; what the model writes itself is nearly as good (SmolLM2:\n"
        "KL .0190, where a file gives .0186). The table at the end compares held-out errors with\n"
        "the published recipe's: standard deviation of the logits' error, KL of the attention\n"
        "probabilities, and relative squared error of the attention output.",
        "  oscar calibrate smollm2-135m\n"
        "  oscar calibrate model.gguf -o model.rot.safetensors --text book.txt --tokens 32768",
        options, CLI_COUNT(options), false};
    cli_args args;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop != CLI_CONTINUE) return stop;
    if (args.n != 1) return cli_usage_error(&spec, "expected one MODEL, found %d", args.n);
    if (strcmp(o.recipe, "oscar") != 0 && strcmp(o.recipe, "zoo") != 0)
        return cli_usage_error(&spec, "--recipe is '%s', expected oscar or zoo", o.recipe);
    if (o.tokens < FIT_TOKENS_LEAST)
        return cli_usage_error(&spec, "--tokens is %lld, expected at least %d", (long long)o.tokens, FIT_TOKENS_LEAST);
    if (o.context > 1 << 28) return cli_usage_error(&spec, "--context is %lld, expected at most %d", (long long)o.context, 1 << 28);
    if (o.pairs > OSCAR_MAX_HEAD_DIM / 2) return cli_usage_error(&spec, "--pairs is %lld, expected at most %d", (long long)o.pairs, OSCAR_MAX_HEAD_DIM / 2);
    if (o.bits_budget != 0 && (o.bits_budget < 2 || o.bits_budget > 4))
        return cli_usage_error(&spec, "--bits-budget is %g, expected 2 to 4", o.bits_budget);
    stop = cli_gpu_layers_check(&spec, o.gpu_layers);
    if (stop != CLI_CONTINUE) return stop;
    char model_path[CLI_PATH_MAX], output[CLI_PATH_MAX];
    stop = cli_model_path(args.arg[0], model_path);
    if (stop == CLI_CONTINUE && !o.output) stop = cli_rotations_output(model_path, output);
    if (stop == CLI_CONTINUE && o.output) snprintf(output, sizeof output, "%s", o.output);
    if (stop == CLI_CONTINUE) stop = check_writable(output);
    if (stop == CLI_CONTINUE) stop = check_writable(o.zoo_output);
    return stop == CLI_CONTINUE ? calibrate(&o, args.arg[0], model_path, output) : stop;
}
