/* CUDA driver-API programs that a GPU-time limit is not made for: what benchmarks/cheats.py runs in a share.
 *
 * cheats_load pattern=NAME seconds=S [kernels=FILE]
 *
 * One pattern is one function that puts a round of work on the card and waits for it as such a program would; it is called
 * until the time is over, by as many threads and processes as its row says. On the simulated card a kernel's name says how long
 * it takes; FILE is the file of kernel times, for a kernel whose time changes while it runs. Needs no CUDA toolkit.
 */
#include "costs.h"
#include "elsewhere.h"
#include "hidden.h"
#include "launches.h"
#include "left.h"
#include "processes.h"
#include "streams.h"
#include "unseen.h"

struct pattern {
    const char *name;
    void (*round)(struct place *);
    unsigned threads, processes, forks; /* `forks`: the process itself never opens a context */
};

static const struct pattern patterns[] = {
#define PATTERN(name, ...) {#name, name, __VA_ARGS__}
    PATTERN(steady, 1, 1, 0),
    PATTERN(short_kernels, 1, 1, 0),
    PATTERN(long_kernels, 1, 1, 0),
    PATTERN(host_bound, 1, 1, 0),
    PATTERN(one_by_one, 1, 1, 0),
    PATTERN(one_by_one_100us, 1, 1, 0),
    PATTERN(polled, 1, 1, 0),
    PATTERN(sets, 1, 1, 0),
    PATTERN(sets_2d, 1, 1, 0),
    PATTERN(tiny_sets, 1, 1, 0),
    PATTERN(copies, 1, 1, 0),
    PATTERN(tiny_copies, 1, 1, 0),
    PATTERN(copies_unified, 1, 1, 0),
    PATTERN(copies_peer, 1, 1, 0),
    PATTERN(copies_peer_3d, 1, 1, 0),
    PATTERN(never_seen, 1, 1, 0),
    PATTERN(modules_reloaded, 1, 1, 0),
    PATTERN(capture_destroyed, 1, 1, 0),
    PATTERN(capture_context_destroyed, 1, 1, 0),
    PATTERN(capture_left_open, 1, 1, 0),
    PATTERN(capture_to_graph, 1, 1, 0),
    PATTERN(kernel_times_change, 1, 1, 0),
    PATTERN(kernel_times_change_unwaited, 1, 1, 0),
    PATTERN(long_and_left_alone, 1, 1, 0),
    PATTERN(huge_after_tiny, 1, 1, 0),
    PATTERN(ever_new_sizes, 1, 1, 0),
    PATTERN(short_and_long_by_argument, 1, 1, 0),
    PATTERN(new_streams, 1, 1, 0),
    PATTERN(new_streams_hardly_waited, 1, 1, 0),
    PATTERN(destroyed_at_work, 1, 1, 0),
    PATTERN(destroyed_by_another, 1, 1, 0),
    PATTERN(new_contexts, 1, 1, 0),
    PATTERN(streams_in_turn, 1, 1, 0),
    PATTERN(many_streams_in_turn, 1, 1, 0),
    PATTERN(bursts_in_turn, 1, 1, 0),
    PATTERN(requests_far_apart, 1, 1, 0),
    PATTERN(long_behind_a_short_one, 1, 1, 0),
    PATTERN(long_behind_a_short_one_and_unloads, 1, 1, 0),
    PATTERN(long_behind_a_short_one_by_children, 1, 1, 1),
    PATTERN(long_behind_a_short_one_by_the_young, 1, 1, 1),
    PATTERN(long_behind_a_short_one_beside_captures, 1, 1, 0),
    PATTERN(long_behind_a_waited_short_one, 1, 1, 0),
    PATTERN(long_behind_many_launches, 1, 1, 0),
    PATTERN(long_behind_slow_launches, 1, 1, 0),
    PATTERN(long_among_priorities, 1, 1, 0),
    PATTERN(one_of_many_sizes_long, 1, 1, 0),
    PATTERN(one_of_many_sizes_seldom_long, 1, 1, 0),
    PATTERN(long_among_short_ones_on_own, 1, 1, 0),
    {"threads_48", threads_round, 48, 1, 0},
    PATTERN(polled_by_threads, 8, 1, 0),
    PATTERN(events_in_idle_contexts, 9, 1, 0),
    {"processes_2", steady, 1, 2, 0},
    {"processes_8", steady, 1, 8, 0},
    {"processes_8_short_rounds", short_rounds, 1, 8, 0},
    {"processes_24", threads_round, 1, 24, 0},
    PATTERN(priorities, 1, 1, 0),
    PATTERN(legacy_stream, 1, 1, 0),
    PATTERN(per_thread_stream, 2, 1, 0),
    PATTERN(no_current, 1, 1, 0),
    PATTERN(foreign_stream, 1, 1, 0),
    PATTERN(capture_toggled, 1, 1, 0),
    {"capture_toggled_by_threads", capture_toggled, 4, 1, 0},
    PATTERN(capture_joined, 1, 1, 0),
    PATTERN(left_by_threads, 1, 1, 0),
    PATTERN(left_on_own, 1, 1, 0),
    PATTERN(left_on_destroyed, 1, 1, 0),
    PATTERN(left_among_destroyed, 1, 1, 0),
    PATTERN(left_while_capturing, 1, 1, 0),
    PATTERN(left_before_capture, 1, 1, 0),
    PATTERN(left_in_another_context, 1, 1, 0),
    PATTERN(graphs, 1, 1, 0),
    PATTERN(graphs_updated, 1, 1, 0),
    PATTERN(graphs_updated_long, 1, 1, 0),
    PATTERN(graphs_made_anew, 1, 1, 0),
    PATTERN(child_graphs, 1, 1, 0),
    PATTERN(graph_of_sets, 1, 1, 0),
    PATTERN(cooperative, 1, 1, 0),
    PATTERN(cluster_launches, 1, 1, 0),
    PATTERN(dependent_launches, 1, 1, 0),
    PATTERN(host_callbacks, 1, 1, 0),
    PATTERN(training_steps, 1, 1, 0),
    PATTERN(training_steps_that_wait, 1, 1, 0),
    PATTERN(host_copies, 1, 1, 0),
    PATTERN(host_copies_overlapped, 1, 1, 0),
    PATTERN(kernel_times_change_between_copies, 1, 1, 0),
    PATTERN(short_and_long_between_copies, 1, 1, 0),
    PATTERN(callbacks_between, 1, 1, 0),
    PATTERN(behind_callbacks_of_another_stream, 1, 1, 0),
    PATTERN(callbacks_in_turn, 1, 1, 0),
    PATTERN(callbacks_before_legacy, 1, 1, 0),
    PATTERN(long_callbacks_before_legacy, 1, 1, 0),
    PATTERN(callbacks_of_a_thread_before_legacy, 1, 1, 0),
    PATTERN(long_behind_a_callback, 1, 1, 0),
    PATTERN(long_behind_callbacks_in_turn, 1, 1, 0),
    PATTERN(event_storm, 1, 1, 0),
    PATTERN(killed_in_mid_kernel, 1, 1, 1),
    PATTERN(stopped_after_launch, 1, 1, 1),
    PATTERN(stopped_in_turn, 1, 1, 1),
    PATTERN(run_in_turn, 1, 1, 1),
    PATTERN(sibling_stopped, 1, 1, 1),
    PATTERN(stopped_beside_a_sibling, 1, 1, 1),
    PATTERN(stopped_for_good, 1, 1, 1),
    PATTERN(stopped_behind_hidden_work, 1, 1, 1),
    PATTERN(stopped_behind_hidden_long_work, 1, 1, 1),
    PATTERN(killed_after_launch, 1, 1, 1),
    PATTERN(killed_within_permit, 1, 1, 1),
    PATTERN(killed_soon, 1, 1, 1),
    PATTERN(short_processes, 1, 1, 1),
    PATTERN(ended_after_launch, 1, 1, 1),
    PATTERN(exec_after_launch, 1, 1, 1),
    PATTERN(ended_with_own, 1, 1, 1),
    PATTERN(ended_with_capture, 1, 1, 1),
    PATTERN(fork_tree, 1, 1, 1),
    PATTERN(no_memory, 1, 1, 0),
    PATTERN(no_descriptors, 1, 1, 1),
    PATTERN(no_threads, 1, 1, 0),
    PATTERN(helper_ended, 1, 1, 0),
    PATTERN(helper_held, 1, 1, 0),
};

static const struct pattern *chosen;
static handle shared_context, shared_module;
static uint64_t end_ns;

static void *work(void *unused)
{
    struct place place = {.context = shared_context, .module = shared_module};
    if (!chosen->forks) {
        CALL(cuCtxSetCurrent, place.context);
        for (unsigned i = 0; i < MOST_STREAMS; i++)
            CALL(cuStreamCreate, &place.streams[i], 1);
    }
    for (; now_ns() < end_ns; place.round++)
        chosen->round(&place);
    return unused;
}

static void one_process(void)
{
    pthread_t threads[MOST_THREADS];
    if (!chosen->forks) {
        struct place place = {0};
        open_context(&place);
        shared_context = place.context;
        shared_module = place.module;
    }
    for (unsigned i = 1; i < chosen->threads; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    work(NULL);
    for (unsigned i = 1; i < chosen->threads; i++)
        pthread_join(threads[i], NULL);
}

int main(int count, char **arguments)
{
    for (int i = 1; i < count; i++) {
        char name[64] = "";
        if (sscanf(arguments[i], "pattern=%63s", name) == 1) {
            for (size_t n = 0; n < sizeof patterns / sizeof *patterns; n++)
                if (strcmp(patterns[n].name, name) == 0)
                    chosen = &patterns[n];
        } else if (sscanf(arguments[i], "seconds=%lf", &seconds) != 1 &&
                   sscanf(arguments[i], "kernels=%511s", kernels_file) != 1) {
            chosen = NULL;
            break;
        }
    }
    if (!chosen) {
        for (size_t n = 0; n < sizeof patterns / sizeof *patterns; n++)
            puts(patterns[n].name);
        return count > 1 ? 2 : 0;
    }
    end_ns = now_ns() + (uint64_t)(seconds * 1e9);
    pid_t children[MOST_PROCESSES];
    for (unsigned i = 1; i < chosen->processes; i++)
        if ((children[i] = fork()) == 0) {
            one_process();
            _exit(0);
        }
    one_process();
    for (unsigned i = 1; i < chosen->processes; i++)
        waitpid(children[i], NULL, 0);
    _exit(0); /* whatever captures is still under way */
}
