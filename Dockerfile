# The programs and the package, for one machine or a cluster:
#   docker build -t attention_jax . && docker run -v "$PWD/runs:/attention_jax/runs" attention_jax
# trains dates:bahdanau2015_deep_tanh on a CPU. JAX selects the wheels of jax for a device: cuda13 or tpu, as in
#   docker build --build-arg JAX=cuda13 -t attention_jax .
FROM python:3.12-slim

ARG JAX=
WORKDIR /attention_jax
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt \
    && if [ -n "$JAX" ]; then pip install --no-cache-dir "jax[$JAX]==$(python -c 'import jax; print(jax.__version__)')"; fi
COPY . .
# As in the Makefile: large arrays in large pages.
ENV GLIBC_TUNABLES=glibc.malloc.hugetlb=1
CMD ["python", "-m", "experiments.train", "--config=configs/dates.py:bahdanau2015_deep_tanh", "--workdir=runs/dates"]
