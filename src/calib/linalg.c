/* Eigenvectors, the Hadamard composition and its column order. */
#include <cblas.h>
#include <math.h>

#include "calib/calib.h"

/* LAPACK has no C header that every distribution installs; this is its Fortran symbol. */
void dsyevd_(const char *jobz, const char *uplo, const int *n, double *a, const int *lda, double *w,
             double *work, const int *lwork, int *iwork, const int *liwork, int *info);
/* Only OpenBLAS has it. */
__attribute__((weak)) void openblas_set_num_threads(int n_threads);

void calib_single_thread_blas(void) {
    if (openblas_set_num_threads) openblas_set_num_threads(1);
}

static bool all_finite(const double *a, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!isfinite(a[i])) return false;
    return true;
}

/* Largest component positive: LAPACK leaves the sign open. v: one vector, [d], contiguous. */
static void fix_sign(int32_t d, double *v) {
    int32_t best = 0;
    for (int32_t i = 1; i < d; i++)
        if (fabs(v[i]) > fabs(v[best]) * (1 + 1e-9)) best = i;
    if (v[best] < 0)
        for (int32_t i = 0; i < d; i++) v[i] = -v[i];
}

oscar_status calib_eigenvectors(int32_t d, const double *a, double *values, double *vectors,
                                oscar_error *error) {
    size_t n = (size_t)d * (size_t)d;
    double *work_matrix = aligned_calloc(n, sizeof *work_matrix);
    int lwork = 1 + 6 * d + 2 * d * d, liwork = 3 + 5 * d, info = 0;
    double *work = aligned_calloc((size_t)lwork, sizeof *work);
    int *iwork = aligned_calloc((size_t)liwork, sizeof *iwork);
    oscar_status status = OSCAR_OK;
    if (!work_matrix || !work || !iwork) {
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d eigenproblem", d, d);
        goto done;
    }
    /* Both triangles, so that row and column major are the same matrix. */
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j <= i; j++)
            work_matrix[i * d + j] = work_matrix[j * d + i] = a[i * d + j];
    if (!all_finite(work_matrix, n)) {
        status = error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "covariance holds NaN or infinity");
        goto done;
    }
    int order = d;
    dsyevd_("V", "L", &order, work_matrix, &order, values, work, &lwork, iwork, &liwork, &info);
    if (info != 0) {
        status = error_set(error, OSCAR_ERROR_INTERNAL, -1, "dsyevd returned %d for a %d x %d matrix", info, d, d);
        goto done;
    }
    for (int32_t j = 0; j < d; j++) { /* column major: vector j is row j of the array */
        fix_sign(d, work_matrix + (size_t)j * (size_t)d);
        for (int32_t i = 0; i < d; i++) vectors[i * d + j] = work_matrix[j * d + i];
    }
done:
    aligned_free(work_matrix);
    aligned_free(work);
    aligned_free(iwork);
    return status;
}

void calib_bit_reversal(int32_t d, int32_t *perm) {
    int32_t bits = 0, rank = 0;
    while ((1 << bits) < d) bits++;
    /* Eigenvalues ascend, so the i-th largest is column d - 1 - i. */
    for (int32_t i = 0; i < (1 << bits); i++) {
        int32_t reversed = 0;
        for (int32_t b = 0; b < bits; b++) reversed |= ((i >> b) & 1) << (bits - 1 - b);
        if (reversed < d) perm[reversed] = d - 1 - rank++;
    }
}

/* Eigenvectors that share a Hadamard block are mixed with each other alone. Where d is no power of
 * two, blocks are dealt every (d / block)-th eigenvector, so that all get strong and weak ones. */
static int32_t dealt_column(int32_t d, int32_t block, int32_t j) {
    int32_t n_blocks = d / block;
    return (j % block) * n_blocks + j / block;
}

oscar_status calib_compose_zoo(int32_t d, const double *c, double *u, oscar_error *error) {
    size_t n = (size_t)d * (size_t)d;
    double *values = aligned_calloc((size_t)d, sizeof *values);
    double *e = aligned_calloc(3 * n, sizeof *e);
    float *hadamard = aligned_calloc(n, sizeof *hadamard);
    int32_t *perm = aligned_calloc((size_t)d, sizeof *perm);
    oscar_status status;
    if (!values || !e || !hadamard || !perm) {
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d rotation", d, d);
        goto done;
    }
    status = calib_eigenvectors(d, c, values, e, error);
    if (status != OSCAR_OK) goto done;
    double *dealt = e + n, *h = e + 2 * n;
    int32_t block = d & -d;
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) dealt[i * d + j] = e[i * d + dealt_column(d, block, j)];
    /* Signs of the float matrix, scale in double: orthogonal to the last bit. */
    rotations_hadamard_matrix(d, hadamard);
    double scale = 1 / sqrt((double)block);
    for (size_t i = 0; i < n; i++) h[i] = hadamard[i] == 0 ? 0 : hadamard[i] > 0 ? scale : -scale;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, d, d, d, 1, dealt, d, h, d, 0, e, d);
    calib_bit_reversal(d, perm);
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) u[i * d + j] = e[i * d + perm[j]];
done:
    aligned_free(values);
    aligned_free(e);
    aligned_free(hadamard);
    aligned_free(perm);
    return status;
}

/* Adds `row` [d], cleared of the n_rows orthonormal rows of q [.., d], to q as one more; a row that
 * lies in their span is left out. Returns the number of rows. */
static int32_t append_row(int32_t d, int32_t n_rows, double *row, double *q) {
    double whole = cblas_dnrm2(d, row, 1);
    if (n_rows == d || !(whole > 0)) return n_rows;
    for (int32_t twice = 0; twice < 2; twice++) /* once more for what rounding left */
        for (int32_t k = 0; k < n_rows; k++)
            cblas_daxpy(d, -cblas_ddot(d, q + k * d, 1, row, 1), q + k * d, 1, row, 1);
    double rest = cblas_dnrm2(d, row, 1);
    if (rest < 1e-6 * whole) return n_rows;
    for (int32_t i = 0; i < d; i++) q[n_rows * d + i] = row[i] / rest;
    return n_rows + 1;
}

/* Orthonormal rows q [d, d] that spread evenly over the channels, the first d/group of them constant
 * within every group: the groups' own directions mixed by a Hadamard matrix, then the rows of a (block)
 * Hadamard matrix, dealt from its blocks in turn. h [d, d] and row [d] are scratch. */
static void grouped_rows(int32_t d, int32_t group, float *h, double *row, double *q) {
    int32_t n_groups = d / group, n_rows = 0, block = d & -d;
    rotations_hadamard_matrix(n_groups, h);
    for (int32_t r = 0; r < n_groups; r++) {
        for (int32_t i = 0; i < d; i++) row[i] = (double)h[r * n_groups + i / group];
        n_rows = append_row(d, n_rows, row, q);
    }
    rotations_hadamard_matrix(d, h);
    for (int32_t j = 0; j < d; j++) {
        int32_t from = j % (d / block) * block + j / (d / block);
        for (int32_t i = 0; i < d; i++) row[i] = (double)h[from * d + i];
        n_rows = append_row(d, n_rows, row, q);
    }
}

oscar_status calib_compose(int32_t d, int32_t group, const double *e, double *u, oscar_error *error) {
    size_t n = (size_t)d * (size_t)d;
    double *q = aligned_calloc(n + (size_t)d, sizeof *q);
    float *h = aligned_calloc(n, sizeof *h);
    oscar_status status = OSCAR_OK;
    if (q && h) {
        grouped_rows(d, group, h, q + n, q);
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, d, d, d, 1, e, d, q, d, 0, u, d);
    } else {
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d rotation", d, d);
    }
    aligned_free(q);
    aligned_free(h);
    return status;
}

oscar_status calib_basis(int32_t d, int32_t n_lead, const double *c, const double *metric, double *e,
                         oscar_error *error) {
    size_t n = (size_t)d * (size_t)d;
    double *work = aligned_calloc(4 * n + 3 * (size_t)d, sizeof *work);
    if (!work) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d basis", d, d);
    double *vectors = work, *root = work + n, *lead = work + 2 * n, *q = work + 3 * n;
    double *values = work + 4 * n, *row = values + d, *half = row + d;
    int32_t n_rows = 0;
    oscar_status status = calib_eigenvectors(d, metric ? metric : c, values, vectors, error);
    if (status == OSCAR_OK && metric) {
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++) q[i * d + j] = vectors[i * d + j] * sqrt(fmax(values[j], 0));
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, d, d, d, 1, q, d, vectors, d, 0, root, d);
        status = calib_congruence(d, root, c, q, error);
        if (status == OSCAR_OK) status = calib_eigenvectors(d, q, values, lead, error);
        for (int32_t r = 0; r < n_lead && status == OSCAR_OK; r++) {
            cblas_dgemv(CblasRowMajor, CblasNoTrans, d, d, 1, root, d, lead + d - 1 - r, d, 0, half, 1);
            cblas_dsymv(CblasRowMajor, CblasLower, d, 1, c, d, half, 1, 0, row, 1);
            n_rows = append_row(d, n_rows, row, q);
        }
    }
    for (int32_t j = d - 1; j >= 0 && status == OSCAR_OK; j--) {
        for (int32_t i = 0; i < d; i++) row[i] = vectors[i * d + j];
        n_rows = append_row(d, n_rows, row, q);
    }
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) e[i * d + j] = q[j * d + i];
    aligned_free(work);
    return status;
}

oscar_status calib_congruence(int32_t d, const double *u, const double *c, double *out,
                              oscar_error *error) {
    double *cu = aligned_calloc((size_t)d * (size_t)d, sizeof *cu);
    if (!cu) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d product", d, d);
    cblas_dsymm(CblasRowMajor, CblasLeft, CblasLower, d, d, 1, c, d, u, d, 0, cu, d);
    cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, d, d, d, 1, u, d, cu, d, 0, out, d);
    for (int32_t i = 0; i < d; i++) /* symmetric to the last bit */
        for (int32_t j = 0; j < i; j++)
            out[i * d + j] = out[j * d + i] = (out[i * d + j] + out[j * d + i]) / 2;
    aligned_free(cu);
    return OSCAR_OK;
}
