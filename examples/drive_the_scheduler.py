"""Drive the production scheduler without a model: it decides on counts, so a loop of ten lines is enough."""

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup

scheduler = Scheduler(SchedulerConfig(num_gpu_blocks=8, num_cpu_blocks=8, block_size=4, max_num_batched_tokens=16))
for name in ("a", "b", "c"):
    scheduler.add(SequenceGroup(name, prompt_len=6, n=2, max_tokens=8))

while scheduler.has_unfinished():
    plan = scheduler.schedule()
    # An executor would now swap out, swap in, copy, and compute the rows of plan.scheduled, in this order.
    left = [group.request_id for group in scheduler.update(plan, stopped={("b", 1)} if plan.step == 3 else ())]
    queues = [
        [group.request_id for group in queue] for queue in (scheduler.running, scheduler.swapped, scheduler.waiting)
    ]
    rows = [(row.group.request_id, row.branch, row.start, row.end) for row in plan.scheduled]
    moves = plan.blocks_to_swap_out + plan.blocks_to_swap_in
    print(f"step {plan.step}: running, swapped, waiting {queues} computed {rows} swapped {moves} left {left}")
