"""The production scheduler against a trace of requests, without a model: a clock, a cost model and counts.

    from engine.scheduler import Scheduler, SchedulerConfig
    from engine.simulate.cost import CostModel
    from engine.simulate.simulation import Simulation
    from engine.simulate.workload import Request

    scheduler = Scheduler(SchedulerConfig(num_gpu_blocks=64, num_cpu_blocks=32))
    seen = Simulation(scheduler, CostModel(step=0.01, prefill_token=1e-4)).run([Request(0.0, 300, 20)])
    print(seen.summary()["latency_s"]["ttft"]["p99"])

The scheduler is driven through its public protocol alone, so what is measured is the code that serves.
"""
