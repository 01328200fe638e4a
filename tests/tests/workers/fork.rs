//! Workers forked from a template, which is initialised only once (`start.mode = "fork"`).

use std::collections::BTreeSet;
use std::process::Command;

use bulkhead_client::blocking::Client;
use bulkhead_tests::confined::{DEFAULT_LAYERS, STRICT_LAYERS, has_layers, is_root};
use bulkhead_tests::{Supervisor, children, is_alive, kill_pid, not_run, parent, wait_for};
use nix::sys::signal::Signal;

fn bulkhead(keys: &str) -> String {
    format!(
        "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"forked\"]\nmax_queue = 20\nsandbox.profile = \"none\"\n{keys}\n"
    )
}

const FORK: &str = "start = { mode = \"fork\" }";

/// Returns the PID of the process that ran `init`, the PID of the worker, and a random number from the worker.
fn who(client: &Client) -> [u32; 3] {
    let reply = client.job("b", "").operation("who").idempotent(true).send().unwrap();
    let text = String::from_utf8(reply.payload().to_vec()).unwrap();
    let numbers: Vec<u32> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    numbers.try_into().unwrap()
}

/// The forked workers are children of the keeper and draw different random numbers.
#[test]
fn all_workers_are_forked_from_one_template() {
    let supervisor = Supervisor::start(&bulkhead(&format!("processes = 3\n{FORK}")));
    let client = Client::connect(supervisor.socket()).unwrap();
    wait_for("three workers", || (supervisor.worker_pids("b").len() == 3).then_some(()));
    let [template, worker, _] = who(&client);
    let below = children(supervisor.keeper());
    assert!(below.contains(&worker) && below.contains(&template) && template != worker);
    let mut seen = BTreeSet::new();
    for _ in 0..20 {
        let [initialised, worker, drawn] = who(&client);
        assert_eq!(initialised, template);
        seen.insert(drawn);
        kill_pid(worker, Signal::SIGKILL);
        wait_for("the worker is gone", || (!is_alive(worker)).then_some(()));
        if seen.len() == 15 {
            break;
        }
    }
    assert!(seen.len() >= 15, "forked workers draw the same random numbers");
}

#[test]
fn template_forks_a_fresh_process_for_each_job() {
    let keys = "recycle = { jobs = 1 }\nstart = { mode = \"fork\", spares = 2 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    let (mut pids, mut templates) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..200 {
        let [template, worker, _] = who(&client);
        assert!(pids.insert(worker), "round {round}: a worker ran two jobs");
        templates.insert(template);
    }
    assert_eq!(templates.len(), 1);
}

/// Each template sends its last message just before it exits. The message must still arrive.
#[test]
fn error_names_threads_of_rejected_template() {
    let is_confined = is_root() && has_layers(DEFAULT_LAYERS);
    for profile in ["none", "default"].into_iter().take(1 + usize::from(is_confined)) {
        let supervisor = Supervisor::launch(
            tempfile::tempdir().unwrap(),
            "",
            &format!(
                "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"forked\", \"threads\"]\nsandbox.profile = \"{profile}\"\n\
                 start = {{ mode = \"fork\", handshake = \"60s\" }}\n\
                 restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n"
            ),
        );
        wait_for("the admin socket", || supervisor.try_get("/livez"));
        for event in supervisor.wait_events("worker_not_started", 100) {
            let text = event.to_string();
            assert!(text.contains("left-behind") && text.contains("start.mode"), "{text}");
        }
    }
}

/// If the template dies, its workers keep running. The keeper starts another template when the next worker dies.
#[test]
fn workers_outlive_their_template() {
    let supervisor = Supervisor::start(&bulkhead(FORK));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    kill_pid(template, Signal::SIGKILL);
    wait_for("the template is gone", || (!is_alive(template)).then_some(()));
    assert_eq!(who(&client)[1], worker);
    kill_pid(worker, Signal::SIGKILL);
    let [other, next, _] = wait_for("another worker", || Some(who(&client)).filter(|who| who[1] != worker));
    assert!(other != template && next != worker && is_alive(other));
}

#[test]
fn reload_replaces_template_together_with_workers() {
    let supervisor = Supervisor::start(&bulkhead(FORK));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    supervisor.configure("", &bulkhead(&format!("env = {{ ANOTHER = \"1\" }}\n{FORK}")));
    supervisor.signal(Signal::SIGHUP);
    let [other, ..] = wait_for("another worker", || Some(who(&client)).filter(|who| who[1] != worker));
    assert_ne!(other, template);
    wait_for("the template is gone", || (!is_alive(template)).then_some(()));
}

#[test]
fn reload_stops_template_that_is_no_longer_configured() {
    let supervisor = Supervisor::start(&bulkhead(FORK));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    supervisor.configure("", &bulkhead("restart = { max = 1000 }").replace("\"forked\"", ""));
    supervisor.signal(Signal::SIGHUP);
    let gone = |pid| wait_for("the process is gone", || (!is_alive(pid)).then_some(()));
    [template, worker].into_iter().for_each(gone);
    supervisor.configure("", &bulkhead(FORK));
    supervisor.signal(Signal::SIGHUP);
    supervisor.wait_events("config_reloaded", 2);
    let [template, worker, _] = wait_for("a forked worker runs", || {
        let reply = client.job("b", "").operation("who").idempotent(true).send().ok()?;
        let text = String::from_utf8(reply.payload().to_vec()).ok()?;
        let numbers: Vec<u32> = text.split(' ').map_while(|number| number.parse().ok()).collect();
        <[u32; 3]>::try_from(numbers).ok()
    });
    supervisor.configure("", &bulkhead(FORK).replace("[bulkhead.b]", "[bulkhead.c]"));
    supervisor.signal(Signal::SIGHUP);
    [template, worker].into_iter().for_each(gone);
}

#[test]
fn template_is_replaced_after_twenty_signal_deaths() {
    let keys = format!("{FORK}\nrestart = {{ max = 1000, backoff = \"1ms\", backoff_max = \"1ms\" }}");
    let supervisor = Supervisor::start(&bulkhead(&keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut templates = Vec::new();
    for _ in 0..25 {
        let [template, worker, _] = who(&client);
        templates.push(template);
        kill_pid(worker, Signal::SIGKILL);
        wait_for("the worker is gone", || (!is_alive(worker)).then_some(()));
    }
    templates.dedup();
    assert_eq!(templates.len(), 2, "{templates:?}");
}

#[test]
fn fork_lost_with_a_replaced_template_is_no_failed_start() {
    let keys = format!(
        "processes = 2\n{FORK}\nrestart = {{ max = 1000, backoff = \"1ms\", backoff_max = \"1ms\" }}"
    );
    let supervisor = Supervisor::start(&bulkhead(&keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    let both = || Some(supervisor.worker_pids("b")).filter(|pids| pids.len() == 2);
    let mut pids = wait_for("two workers", both);
    let template = who(&client)[0];
    for _ in 0..18 {
        client.job("b", "x").send().unwrap();
        let killed = who(&client)[1];
        kill_pid(killed, Signal::SIGKILL);
        pids = wait_for("another worker", || both().filter(|pids| !pids.contains(&killed)));
    }
    // The stopped template cannot fork, until it is killed after the twentieth death.
    assert_eq!(who(&client)[0], template);
    kill_pid(template, Signal::SIGSTOP);
    let restarts = supervisor.number("b", "restarts");
    kill_pid(pids[0], Signal::SIGKILL);
    supervisor.wait_number("b", "restarts", restarts + 1);
    kill_pid(pids[1], Signal::SIGKILL);
    wait_for("two new workers", || both().filter(|now| now.iter().all(|pid| !pids.contains(pid))));
    assert_ne!(who(&client)[0], template);
    assert!(
        supervisor.events("worker_not_started").is_empty(),
        "{:?}",
        supervisor.events("worker_not_started")
    );
}

/// A hung template cannot fork, so the keeper kills the template and starts another.
#[test]
fn hung_template_is_replaced() {
    let supervisor = Supervisor::start(&bulkhead(FORK));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    kill_pid(template, Signal::SIGSTOP);
    kill_pid(worker, Signal::SIGKILL);
    let told = supervisor.wait_events("worker_not_started", 1);
    let message = told[0]["message"].as_str().unwrap();
    assert!(message.contains("the template did not fork within ten seconds and was killed"), "{message}");
    let [other, next, _] = who(&client);
    assert!(other != template && next != worker);
    wait_for("the template is gone", || (!is_alive(template)).then_some(()));
}

/// Without free descriptors, the supervisor cannot create the pipes for a template's output.
#[test]
fn failed_template_starts_leak_no_user_ids() {
    const FAILURES: usize = 6;
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    // There are fewer user IDs than failures.
    let ids = "worker_uids = \"60600-60603\"";
    let keys = format!("{FORK}\nrestart = {{ backoff = \"50ms\", backoff_max = \"50ms\", max = 1000 }}");
    let supervisor = Supervisor::start_with(ids, &bulkhead(&keys).replace("\"none\"", "\"default\""));
    let client = Client::connect(supervisor.socket()).unwrap();
    client.job("b", "x").send().unwrap();
    let limit_files = |most: u32| {
        let limit = [format!("--pid={}", supervisor.pid()), format!("--nofile={most}:")];
        assert!(Command::new("prlimit").args(limit).status().unwrap().success());
    };
    let worker = supervisor.worker_pids("b")[0];
    let processes = children(parent(worker).unwrap());
    limit_files(3);
    processes.into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
    wait_for("the supervisor has failed to start templates", || {
        (supervisor.log().matches("failed to prepare the template").count() >= FAILURES).then_some(())
    });
    limit_files(1024);
    wait_for("the bulkhead is ready", || (supervisor.snapshot("b")["state"] == "ready").then_some(()));
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
}

/// While the template forks, the keeper cannot distinguish a new worker from a leftover process. The keeper waits
/// only a limited time for the fork.
#[test]
fn leftover_process_is_killed_after_failed_fork() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let keys = format!(
        "processes = 2\n{FORK}\nrestart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}"
    );
    let bulkhead =
        bulkhead(&keys).replace("\"none\"", "\"default\"").replace("\"forked\"", "\"forked\", \"twice\"");
    let supervisor = Supervisor::start(&bulkhead);
    let client = Client::connect(supervisor.socket()).unwrap();
    let workers =
        wait_for("two workers", || Some(supervisor.worker_pids("b")).filter(|pids| pids.len() == 2));
    let nest = parent(workers[0]).unwrap();
    let template = children(nest).into_iter().find(|pid| !workers.contains(pid)).unwrap();
    kill_pid(template, Signal::SIGSTOP);
    kill_pid(workers[0], Signal::SIGKILL);
    wait_for("the next fork is pending", || {
        let snapshot = supervisor.snapshot("b");
        let workers = snapshot["workers"].as_array().unwrap();
        workers.iter().any(|worker| worker["pid"].is_null()).then_some(())
    });
    client.job("b", "").operation("leave").send().unwrap();
    kill_pid(workers[1], Signal::SIGKILL);
    wait_for("only the template and the leftover process remain", || {
        let left = children(nest);
        (!left.contains(&workers[1]) && left.len() == 2).then_some(())
    });
    kill_pid(template, Signal::SIGCONT);
    let told = supervisor.wait_events("worker_not_started", 1);
    assert!(told[0]["message"].as_str().unwrap().contains("fork: "), "{told:?}");
    wait_for("only the template is left", || (children(nest) == [template]).then_some(()));
}

/// Each process in a chain forks a successor and exits, so signals always come too late. The test does not cover the
/// profile `none`, because without a limit on the number of processes, zombies can use up all PIDs on the machine.
#[test]
fn process_chains_do_not_affect_jobs_in_other_workers() {
    for (profile, layers) in [("default", DEFAULT_LAYERS), ("strict", STRICT_LAYERS)] {
        if !is_root() || !has_layers(layers) {
            not_run!("{profile} requires root and the profile's layers");
            continue;
        }
        let keys = format!("processes = 4\ndeadline = \"60s\"\n{FORK}");
        let keys = bulkhead(&keys).replace("\"none\"", &format!("\"{profile}\""));
        let supervisor = Supervisor::start(&keys);
        wait_for("four workers", || (supervisor.worker_pids("b").len() == 4).then_some(()));
        let client = Client::connect(supervisor.socket()).unwrap();
        std::thread::scope(|scope| {
            // Each job lasts longer than the time for which the keeper tries to kill leftover processes.
            let sleep = || client.job("b", "4000").operation("sleep").send();
            let siblings: Vec<_> = (0..3).map(|_| scope.spawn(sleep)).collect();
            wait_for("three jobs run", || {
                (supervisor.snapshot("b")["in_flight"].as_u64() == Some(3)).then_some(())
            });
            client.job("b", "50").operation("chains").send().unwrap();
            for sibling in siblings {
                assert_eq!(sibling.join().unwrap().unwrap().payload(), b"slept", "{profile}");
            }
        });
    }
}

#[test]
fn later_workers_do_not_inherit_changes_to_the_template() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        not_run!("the test requires at least two processors");
        return;
    }
    for (profile, layers) in [("none", &[][..]), ("default", DEFAULT_LAYERS), ("strict", STRICT_LAYERS)] {
        if !is_root() || !has_layers(layers) {
            not_run!("{profile} requires root and the profile's layers");
            continue;
        }
        let keys = bulkhead(&format!("recycle = {{ jobs = 1 }}\n{FORK}"))
            .replace("\"none\"", &format!("\"{profile}\""));
        let supervisor = Supervisor::start(&keys);
        let client = Client::connect(supervisor.socket()).unwrap();
        let ask = |operation: &str| {
            let reply = client.job("b", "").operation(operation).send().unwrap();
            String::from_utf8(reply.payload().to_vec()).unwrap()
        };
        let (before, template) = (ask("attributes"), who(&client)[0]);
        for round in 0..3 {
            ask("alter-template");
            // The next worker may have been forked before the change.
            ask("attributes");
            assert_eq!(ask("attributes"), before, "{profile}, round {round}");
        }
        // If the keeper lacks the privilege to raise a limit again, it replaces the template.
        assert!(profile == "none" || who(&client)[0] == template, "{profile}: the template was replaced");
    }
}

#[test]
fn program_without_template_protocol_is_rejected() {
    let supervisor = Supervisor::launch(
        tempfile::tempdir().unwrap(),
        "",
        &format!(
            "[bulkhead.b]\ncommand = [\"MISBEHAVE\", \"raw\", \"liar\"]\nsandbox.profile = \"none\"\n{FORK}\n"
        ),
    );
    wait_for("the admin socket", || supervisor.try_get("/livez"));
    let events = supervisor.wait_events("worker_not_started", 1);
    let text = events[0].to_string();
    assert!(text.contains("does not follow the template protocol"), "{text}");
}

#[test]
fn new_keeper_starts_another_template() {
    let supervisor = Supervisor::start(&bulkhead(&format!("processes = 2\n{FORK}")));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    kill_pid(supervisor.keeper(), Signal::SIGKILL);
    let gone = || (!is_alive(template) && !is_alive(worker)).then_some(());
    wait_for("template and workers are gone", gone);
    let [other, next, _] = who(&client);
    assert!(other != template && next != worker);
}

/// The keeper kills leftover processes while other workers are being forked.
#[test]
fn leftover_processes_of_forked_workers_are_killed() {
    let keys = "recycle = { jobs = 1 }\nstart = { mode = \"fork\", spares = 2 }";
    let supervisor = Supervisor::start(&bulkhead(keys));
    let client = Client::connect(supervisor.socket()).unwrap();
    let mut left = Vec::new();
    for _ in 0..30 {
        let reply = client.job("b", "").operation("leave").send().unwrap();
        left.push(String::from_utf8(reply.payload().to_vec()).unwrap().trim().parse::<u32>().unwrap());
        who(&client);
    }
    wait_for("the leftover processes are gone", || left.iter().all(|&pid| !is_alive(pid)).then_some(()));
    assert_eq!(supervisor.events("worker_not_started").len(), 0);
}

#[test]
fn template_and_workers_die_with_the_supervisor() {
    let mut supervisor = Supervisor::start(&bulkhead(&format!("processes = 2\n{FORK}")));
    let client = Client::connect(supervisor.socket()).unwrap();
    let [template, worker, _] = who(&client);
    supervisor.signal(Signal::SIGKILL);
    let _ = supervisor.wait();
    wait_for("template and worker are gone", || (!is_alive(template) && !is_alive(worker)).then_some(()));
}

#[test]
fn process_forked_by_initialisation_is_not_a_worker() {
    let supervisor = Supervisor::start(&bulkhead(FORK).replace("\"forked\"", "\"forked\", \"stray\""));
    let client = Client::connect(supervisor.socket()).unwrap();
    let submit = |operation: &str| {
        let reply = client.job("b", "").operation(operation).send().unwrap();
        String::from_utf8(reply.payload().to_vec()).unwrap()
    };
    let process = submit("who");
    assert_eq!((submit("template").as_str(), submit("worker").as_str()), ("Ok(true)", "Ok(true)"));
    assert_eq!(submit("who"), process);
}
