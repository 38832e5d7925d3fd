/* Puts OpenBLAS in front of the reference BLAS that MLX's Linux CPU wheel carries.
 *
 * libmlx.so looks up exactly these three BLAS routines by name. This library defines them under those names and is
 * loaded with RTLD_GLOBAL before MLX, so the dynamic linker binds MLX to it. It is linked against libscipy_openblas,
 * which exports the same routines with the prefix `scipy_`. MLX's LAPACK keeps its own BLAS.
 */
typedef int blasint;

void scipy_cblas_sgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, float alpha, const float *a,
                       blasint lda, const float *b, blasint ldb, float beta, float *c, blasint ldc);
void scipy_cblas_dgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, double alpha,
                       const double *a, blasint lda, const double *b, blasint ldb, double beta, double *c, blasint ldc);
void scipy_cblas_cgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, const void *alpha,
                       const void *a, blasint lda, const void *b, blasint ldb, const void *beta, void *c, blasint ldc);

void cblas_sgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, float alpha, const float *a,
                 blasint lda, const float *b, blasint ldb, float beta, float *c, blasint ldc) {
  scipy_cblas_sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, double alpha, const double *a,
                 blasint lda, const double *b, blasint ldb, double beta, double *c, blasint ldc) {
  scipy_cblas_dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, const void *alpha, const void *a,
                 blasint lda, const void *b, blasint ldb, const void *beta, void *c, blasint ldc) {
  scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
