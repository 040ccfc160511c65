/* `oscar eval`: methods side by side on a text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cli.h"
#include "cli/phases.h"
#include "eval/compare.h"
#include "eval/fit_model.h"
#include "eval/float_model.h"
#include "eval/runner.h"
#include "oscar/oscar.h"

typedef struct eval_options {
    const char *rotations, *zoo, *text, *methods, *calibration_text;
    int64_t context, chunks, skip, sink, recent, calibration_tokens, threads, gpu_layers;
    const char *weights;
    bool json;
} eval_options;

/* What a comparison borrows, and what must be released after it. */
typedef struct eval_inputs {
    struct llama_model *model;
    oscar_rotations *rotations, *zoo;
    token_chunks chunks;
    compare_method methods[COMPARE_MAX_METHODS];
    int32_t n_methods;
} eval_inputs;

static bool needs(const eval_inputs *in, int32_t kind) {
    for (int32_t i = 0; i < in->n_methods; i++)
        if (in->methods[i].kind == kind) return true;
    return false;
}

static oscar_status read_text(const eval_options *o, eval_inputs *in, oscar_error *error) {
    text_file text;
    oscar_status status = text_open(&text, o->text, error);
    if (status != OSCAR_OK) return status;
    status = text_chunks_in_order(llama_model_get_vocab(in->model), &text, (int32_t)o->chunks, (int32_t)o->context, &in->chunks, error);
    text_close(&text);
    return status;
}

/* Rotations of the published recipe: from a file, or fitted now on as many tokens as ours were. */
static oscar_status find_zoo(const eval_options *o, eval_inputs *in, oscar_error *error) {
    if (o->zoo) return oscar_rotations_load(&in->zoo, o->zoo, error);
    const char *fitted = in->rotations ? oscar_rotations_metadata(in->rotations, "calibration_tokens") : NULL;
    int64_t n_tokens = o->calibration_tokens;
    if (n_tokens == 0) n_tokens = fitted ? strtoll(fitted, NULL, 10) : 0;
    if (n_tokens <= 0) n_tokens = FIT_TOKENS_DEFAULT;
    fprintf(stderr, "method zoo: no --zoo FILE, fitting the published recipe on %lld tokens of %s\n", (long long)n_tokens,
            o->calibration_text ? o->calibration_text : "text that the model writes (--calibration-text FILE takes yours)");
    fit_options options = {.model_name = "", .text_path = o->calibration_text, .n_tokens = n_tokens, .n_threads = runner_threads(o->threads),
                           .seed = 1, .progress = phases_show, .warn = phases_warn};
    fit_report report;
    oscar_status status = fit_model_zoo(in->model, &options, &in->zoo, &report, error);
    phases_end();
    return status;
}

static void print_table(const eval_inputs *in, const compare_report *r, bool kl) {
    if (kl) printf("%-20s %10s %10s %10s %9s %8s %8s\n", "method", "KL", "KL 99 %", "PPL", "top-1", "bits", "+windows");
    else printf("%-20s %10s %8s %8s\n", "method", "PPL", "bits", "+windows");
    if (kl) printf("%-20s %10s %10s %10.4f %9s %8s %8s\n", "(exact)", "", "", r->exact_ppl, "", "32", "");
    for (int32_t i = 0; i < in->n_methods; i++) {
        const compare_result *m = &r->method[i];
        if (kl)
            printf("%-20s %10.5f %10.4f %10.4f %8.2f%% %8.3f %8.3f\n", in->methods[i].name, m->kl, m->kl_p99, m->ppl, 100 * m->top1,
                   m->bits, m->bits_windows);
        else printf("%-20s %10.4f %8.3f %8.3f\n", in->methods[i].name, m->ppl, m->bits, m->bits_windows);
    }
}

static json_t *report_json(const char *model, const eval_options *o, const eval_inputs *in, const compare_report *r, bool kl) {
    json_t *methods = json_array();
    for (int32_t i = 0; i < in->n_methods; i++) {
        const compare_result *m = &r->method[i];
        json_t *item = json_object();
        json_object_set_new(item, "name", json_string(in->methods[i].name));
        if (kl) {
            json_object_set_new(item, "kl", json_real(m->kl));
            json_object_set_new(item, "kl_p99", json_real(m->kl_p99));
        }
        json_object_set_new(item, "ppl", json_real(m->ppl));
        if (kl) json_object_set_new(item, "top1", json_real(m->top1));
        json_object_set_new(item, "bits", json_real(m->bits));
        json_object_set_new(item, "bits_windows", json_real(m->bits_windows));
        json_array_append_new(methods, item);
    }
    json_t *out = json_object();
    json_object_set_new(out, "model", json_string(model));
    if (kl) json_object_set_new(out, "baseline", json_pack("{s:f}", "ppl", r->exact_ppl));
    json_object_set_new(out, "context", json_integer(o->context));
    json_object_set_new(out, "chunks", json_integer(o->chunks));
    json_object_set_new(out, "skip", json_integer(o->skip));
    json_object_set_new(out, "sink", json_integer(o->sink));
    json_object_set_new(out, "recent", json_integer(o->recent));
    json_object_set_new(out, "weights", json_string(o->weights));
    json_object_set_new(out, "gpu_layers", json_integer(o->gpu_layers));
    json_object_set_new(out, "scored", json_integer(r->n_scored));
    json_object_set_new(out, "methods", methods);
    return out;
}

/* The float32 copy of a model in the cache folder, made when it is not there or older. */
static oscar_status float_copy(const char *model_path, char path[CLI_PATH_MAX], oscar_error *error) {
    char folder[CLI_PATH_MAX];
    const char *base = strrchr(model_path, '/');
    base = base ? base + 1 : model_path;
    if (cli_cache_folder(folder, "float") != CLI_CONTINUE || snprintf(path, CLI_PATH_MAX, "%s/%s", folder, base) >= CLI_PATH_MAX || cli_make_folders(path) != CLI_CONTINUE)
        return error_set(error, OSCAR_ERROR_IO, -1, "no place for a float32 copy of %s", model_path);
    struct stat ours, theirs;
    if (stat(path, &ours) == 0 && stat(model_path, &theirs) == 0 && ours.st_mtime >= theirs.st_mtime) return OSCAR_OK;
    oscar_status status = float_model_write(model_path, path, phases_show, error);
    phases_end();
    return status;
}

static oscar_status prepare(const eval_options *o, const char *model_path, const char *rotations_path, eval_inputs *in, oscar_error *error) {
    /* Small files first: a wrong one is told before the model is loaded. */
    oscar_status status = OSCAR_OK;
    if (rotations_path) status = oscar_rotations_load(&in->rotations, rotations_path, error);
    char widened[CLI_PATH_MAX];
    bool widen = strcmp(o->weights, "f32") == 0;
    if (status == OSCAR_OK && widen) status = float_copy(model_path, widened, error);
    if (status == OSCAR_OK) status = runner_load_model(&in->model, widen ? widened : model_path, (int32_t)o->gpu_layers, error);
    if (status == OSCAR_OK) status = read_text(o, in, error);
    if (status == OSCAR_OK && needs(in, METHOD_ZOO)) status = find_zoo(o, in, error);
    return status;
}

static int evaluate(const eval_options *o, const char *model, const char *model_path, const char *rotations_path, eval_inputs *in, bool kl) {
    oscar_error error = {0};
    compare_report report;
    oscar_status status = prepare(o, model_path, rotations_path, in, &error);
    if (status == OSCAR_OK) {
        compare_options options = {
            .methods = in->methods, .n_methods = in->n_methods, .rotations = in->rotations, .zoo = in->zoo, .text = &in->chunks,
            .skip = (int32_t)o->skip, .sink = (int32_t)o->sink, .recent = (int32_t)o->recent,
            .n_threads = runner_threads(o->threads), .exact_baseline = kl, .progress = phases_show};
        status = compare_run(in->model, &options, &report, &error);
        phases_end();
    }
    token_chunks_free(&in->chunks);
    oscar_rotations_free(in->rotations);
    oscar_rotations_free(in->zoo);
    if (in->model) llama_model_free(in->model);
    if (status != OSCAR_OK) return cli_error("%s", error.message);
    if (o->json) return cli_print_json(report_json(model, o, in, &report, kl));
    print_table(in, &report, kl);
    return cli_finish_output();
}

static int check_numbers(const cli_spec *spec, const eval_options *o) {
    if (strcmp(o->weights, "f32") != 0 && strcmp(o->weights, "as-is") != 0)
        return cli_usage_error(spec, "--weights is %s, expected f32 or as-is", o->weights);
    if (o->context < 2 || o->context > 1 << 24) return cli_usage_error(spec, "--context is %lld, expected 2 to %d", (long long)o->context, 1 << 24);
    if (o->chunks < 1 || o->chunks > 1 << 16) return cli_usage_error(spec, "--chunks is %lld, expected 1 to %d", (long long)o->chunks, 1 << 16);
    if (o->skip > o->context - 2)
        return cli_usage_error(spec, "--skip is %lld, expected less than --context - 1 (%lld)", (long long)o->skip, (long long)o->context - 1);
    if (o->sink > 1 << 24 || o->recent > 1 << 24) return cli_usage_error(spec, "--sink and --recent must be at most %d", 1 << 24);
    if (o->calibration_tokens != 0 && o->calibration_tokens < FIT_TOKENS_LEAST)
        return cli_usage_error(spec, "--calibration-tokens is %lld, expected at least %d", (long long)o->calibration_tokens, FIT_TOKENS_LEAST);
    return cli_gpu_layers_check(spec, o->gpu_layers);
}

int cmd_eval(int argc, char **argv) {
    eval_options o = {.methods = "int2", .weights = "f32", .context = 4096, .chunks = 8, .skip = 512, .sink = 64, .recent = 256};
    const cli_option options[] = {
        {"text", 0, CLI_STRING, &o.text, "FILE", "UTF-8 text; the first chunks x context tokens are used"},
        {"methods", 'm', CLI_STRING, &o.methods, "LIST", "comma-separated, see above (default int2)"},
        {"rotations", 0, CLI_STRING, &o.rotations, "FILE", "for int2 (default: where `oscar calibrate` writes)"},
        {"zoo", 0, CLI_STRING, &o.zoo, "FILE", "for zoo, from `oscar calibrate --recipe zoo` or\n--zoo-output (default: fitted now)"},
        {"calibration-text", 0, CLI_STRING, &o.calibration_text, "FILE", "text to fit zoo on (default: the model writes its own)"},
        {"calibration-tokens", 0, CLI_INT, &o.calibration_tokens, "N", "tokens to fit zoo on (default: as many as int2's file)"},
        {"context", 'c', CLI_INT, &o.context, "N", "tokens of a chunk (default 4096)"},
        {"chunks", 0, CLI_INT, &o.chunks, "N", "chunks (default 8)"},
        {"skip", 0, CLI_INT, &o.skip, "N", "tokens not scored at the start of each (default 512)"},
        {"sink", 0, CLI_INT, &o.sink, "N", "first tokens kept in BF16 (default 64)"},
        {"recent", 0, CLI_INT, &o.recent, "N", "last tokens kept in BF16 (default 256)"},
        {"weights", 0, CLI_STRING, &o.weights, "f32|as-is", "f32 (default): run a float32 copy of the model, made once\nin the cache folder. With quantised weights ggml rounds\nactivations to 8 bits, and the least change of the cache\nhas a KL of its own (method bf16 shows it); as-is: do so"},
        {"threads", 't', CLI_INT, &o.threads, "N", "threads (default: all cores)"},
        CLI_GPU_LAYERS_OPTION(&o.gpu_layers),
        {"json", 0, CLI_FLAG, &o.json, NULL, "print JSON"},
    };
    const cli_spec spec = {
        "eval", "kl|ppl MODEL --text FILE [--methods LIST] [options]",
        "Measures what a way of keeping the cache costs. `kl` compares next-token distributions\n"
        "with those of an exact float32 cache in the same engine: mean and 99th percentile of\n"
        "KL(exact || method) in nats, perplexity, how often the most probable token is the same,\n"
        "and bits an element (history alone, and with the BF16 windows at this context).\n"
        "`ppl` gives perplexities alone.\n"
        "\n"
        "Methods: exact (a second exact cache: KL 0), bf16 (BF16 rows, nothing quantised: the floor\n"
        "that rounding in the engine sets), int2 (the rotation file), zoo (OSCAR as published),\n"
        "quarot (Hadamard with OSCAR's clips), naive (min-max), kivi (keys per channel over 128\n"
        "tokens, values per token). Each may be followed by bits and windows:\n"
        "int2:3, int2:k3, int2:k3v2, quarot:4, int2@4/64, zoo:3@0/0.",
        "  oscar eval kl smollm2-135m --text wiki.txt --methods int2,kivi,exact\n"
        "  oscar eval kl m.gguf --rotations r.safetensors --text wiki.txt --context 4096 --chunks 8 \\\n"
        "      --methods int2,zoo,quarot,naive,kivi --json\n"
        "  oscar eval ppl m.gguf --text wiki.txt --methods exact,int2",
        options, CLI_COUNT(options), false};
    cli_args args;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop != CLI_CONTINUE) return stop;
    if (args.n != 2 || (strcmp(args.arg[0], "kl") != 0 && strcmp(args.arg[0], "ppl") != 0))
        return cli_usage_error(&spec, "expected `kl MODEL` or `ppl MODEL`");
    if (!o.text) return cli_usage_error(&spec, "--text FILE is missing");
    stop = check_numbers(&spec, &o);
    if (stop != CLI_CONTINUE) return stop;
    eval_inputs in = {0};
    oscar_error error = {0};
    if (compare_parse_methods(o.methods, in.methods, &in.n_methods, &error) != OSCAR_OK) return cli_usage_error(&spec, "%s", error.message);
    char model_path[CLI_PATH_MAX], rotations_path[CLI_PATH_MAX];
    stop = cli_model_path(args.arg[1], model_path);
    bool file = o.rotations || needs(&in, METHOD_INT2);
    if (stop == CLI_CONTINUE && file) stop = cli_rotations_path(o.rotations, model_path, rotations_path);
    if (stop != CLI_CONTINUE) return stop;
    return evaluate(&o, args.arg[1], model_path, file ? rotations_path : NULL, &in, strcmp(args.arg[0], "kl") == 0);
}
