"""Weight transports from the learner to an engine, all behind one protocol.

`WeightTransport.publish(source, version, receivers)` (transport.py) sends one version to all receivers and returns when
they sample with it. An engine with weights of its own holds a transport; `engine.publish` calls it.

    transport             source → receiver                  how                                        file
    InProcessTransport    learner's module → same module     nothing moves                              transport.py
    FileTransport         learner's ranks → actors           safetensors in shared memory, or in the    transport.py
                                                             run's folder
    CollectiveTransport   learner's ranks → actors           broadcast by NCCL or gloo                  transport.py
    VllmFileTransport     learner's module → vLLM worker     safetensors, in shared memory if it fits   vllm.py
    CudaIpcTransport      learner's module → vLLM worker     buckets that both processes map            vllm.py

Shared code: names.py (which weights are sent, gathering, names), files.py (checksummed files),
buckets.py (packing into byte buffers, CUDA IPC handles), collective.py (the broadcast group).

To add a transport: write a class with `publish` and `close` in transport.py or a file of its own, and construct it
where its engine is made: `rollout/vllm/engine.py` for vLLM, `app/cluster.py` for a cluster. In a cluster also add its
name to `cluster.transport` in `config/schema.py` and say in `cluster.placement.choose_transport` when it is chosen;
derive from `FileTransport`, which serves engines that replace dead ones.

Publishing weights and flushing a cache are separate: `flush_cache` drops cached keys and values and keeps the weights.
"""
