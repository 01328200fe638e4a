//! Network access that is limited to outgoing connections (`network = { tcp_ports = […] }`).

use std::net::TcpListener;

use bulkhead_tests::attempts::Expected::{self, Refused, Succeeds};
use bulkhead_tests::confined::{DEFAULT_LAYERS, Ended, Place, STRICT_LAYERS, Setup, has_layers, is_root};
use bulkhead_tests::not_run;
use serde_json::{Value, json};

const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";

const WORKER: &str = "command = [\"HOSTILE\"]";
const PROGRAM: &str = "exec = [\"HOSTILE\", \"once\"]";

fn profiles() -> impl Iterator<Item = &'static str> {
    let all = [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];
    let has = |layers: &[&str]| has_layers(layers) && has_layers(&["landlock tcp"]);
    all.into_iter().filter(move |(_, layers)| has(layers)).map(|(profile, _)| profile)
}

fn bulkhead(name: &str, runs: &str, sandbox: &str) -> String {
    format!(
        "[bulkhead.{name}]\n{runs}\ncwd = \"work\"\nmax_queue = 10\ndeadline = \"60s\"\n\
         restart = {{ backoff = \"1ms\", max = 1000 }}\nsandbox = {{ {sandbox} }}\n"
    )
}

/// Listeners on an IPv4 address and, if this machine has IPv6, on an IPv6 address.
fn listeners() -> Vec<TcpListener> {
    let v6 = TcpListener::bind("[::1]:0");
    if v6.is_err() {
        not_run!("connections over IPv6: this machine has no IPv6");
    }
    [TcpListener::bind("127.0.0.1:0").unwrap()].into_iter().chain(v6).collect()
}

fn addresses(listeners: &[TcpListener]) -> Vec<String> {
    listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

fn ports(listeners: &[TcpListener]) -> Vec<u16> {
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

/// Attempts that must be refused even if the worker can use TCP, both with and without the `udp` flag.
const ALWAYS_REFUSED: [(&str, &[&str]); 13] = [
    ("connect-by-mptcp", &["EPROTONOSUPPORT"]),
    ("connect-by-fast-open", &["EOPNOTSUPP"]),
    // Refused by the filter or, with the `udp` flag, by Landlock.
    ("listen-on-tcp", &["EPERM", "EACCES"]),
    ("listen-on-any-port", &["EPERM"]),
    ("raw-socket", &["ESOCKTNOSUPPORT"]),
    ("packet-socket", &["EAFNOSUPPORT"]),
    ("netfilter-socket", &["EPROTONOSUPPORT"]),
    ("virtual-machine-socket", &["EAFNOSUPPORT"]),
    ("cryptography-socket", &["EAFNOSUPPORT"]),
    ("io-uring", &["ENOSYS"]),
    ("connect-to-path-socket", &["EAFNOSUPPORT", "EACCES", "ENOENT"]),
    ("connect-to-abstract-socket", &["EAFNOSUPPORT", "EPERM"]),
    ("take-an-abstract-name", &["EPERM", "EAFNOSUPPORT"]),
];

#[track_caller]
fn assert_ended(place: &Place, bulkhead: &str, name: &str, targets: &Value, expected: Expected) {
    let ended = place.attempt(&place.client(), bulkhead, name, targets);
    assert!(ended.is(expected), "{bulkhead}, {name} at {}: {ended:?}, not {expected:?}", targets["tcp"]);
}

/// Checks that a bulkhead's workers can connect to the ports of the `permitted` listeners, and to no other ports.
fn assert_only(place: &Place, bulkhead: &str, permitted: &[TcpListener], udp: bool) {
    let others = listeners();
    let with = |tcp: &str| {
        let mut targets = place.targets("sibling");
        targets["tcp"] = json!(tcp);
        targets
    };
    for address in addresses(permitted) {
        assert_ended(place, bulkhead, "connect-by-tcp", &with(&address), Succeeds);
    }
    for address in addresses(&others) {
        assert_ended(place, bulkhead, "connect-by-tcp", &with(&address), Refused(&["EACCES"], ""));
    }
    for address in addresses(permitted).into_iter().chain(addresses(&others)) {
        for (name, errors) in ALWAYS_REFUSED {
            assert_ended(place, bulkhead, name, &with(&address), Refused(errors, ""));
        }
        let sent = if udp { Succeeds } else { Refused(&["ESOCKTNOSUPPORT"], "") };
        assert_ended(place, bulkhead, "send-by-udp", &with(&address), sent);
        assert_ended(place, bulkhead, "routing-socket", &with(&address), Succeeds);
    }
}

#[test]
fn worker_connects_only_to_permitted_ports() {
    for profile in profiles() {
        let permitted = listeners();
        let ports = ports(&permitted);
        let network = |ports: &[u16], udp: bool| {
            format!("{profile}, network = {{ tcp_ports = {ports:?}, udp = {udp} }}")
        };
        let bulkheads = bulkhead("worker", WORKER, &network(&ports, false))
            + &bulkhead("program", PROGRAM, &network(&ports, false))
            + &bulkhead("udp", WORKER, &network(&ports, true))
            + &bulkhead("nothing", WORKER, &network(&[], false))
            + &bulkhead("sibling", WORKER, profile);
        let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
        assert_only(&place, "worker", &permitted, false);
        assert_only(&place, "program", &permitted, false);
        assert_only(&place, "udp", &permitted, true);
        assert_only(&place, "nothing", &[], false);
        for name in ["submit-jobs", "administer"] {
            let ended = place.attempt(&place.client(), "worker", name, &place.targets("sibling"));
            assert!(matches!(ended, Ended::Refused(..)), "{profile}, {name}: {ended:?}");
        }
    }
}

#[test]
fn forked_worker_connects_only_to_permitted_ports() {
    for profile in profiles().filter(|_| is_root()) {
        let permitted = listeners();
        let sandbox = format!("{profile}, network = {{ tcp_ports = {:?} }}", ports(&permitted));
        let runs = format!("{WORKER}\nstart.mode = \"fork\"");
        let bulkheads = bulkhead("forked", &runs, &sandbox) + &bulkhead("sibling", WORKER, profile);
        let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
        assert_only(&place, "forked", &permitted, false);
    }
}

/// Port rules require version 4 of the Landlock ABI. On older kernels, workers start only if `best_effort` permits it,
/// and the system call filter still applies.
#[test]
fn tcp_ports_require_landlock_unless_best_effort() {
    for profile in profiles() {
        let network = |more: &str| {
            format!("{profile}, network = {{ tcp_ports = [1] }}")
                .replace("best_effort = [\"identity\"", &format!("best_effort = [\"identity\"{more}"))
        };
        let lenient = match profile {
            DEFAULT => format!("{}, best_effort = [\"landlock_tcp\"]", network("")),
            _ => network(", \"landlock_tcp\""),
        };
        let bulkheads = bulkhead("required", WORKER, &network("")).replace("max = 1000", "max = 1")
            + &bulkhead("lenient", WORKER, &lenient)
            + &bulkhead("sibling", WORKER, profile);
        let place = Setup { bulkheads: &bulkheads, without: "landlock_tcp", ..Setup::default() }.start();
        let failure = place.failure("required");
        for part in ["landlock tcp", "\"landlock_tcp\"", "best_effort"] {
            assert!(failure.contains(part), "{profile}: {failure}");
        }
        let told = place.confinement("lenient");
        assert!(told[0].missing.iter().any(|layer| layer == "landlock_tcp"), "{told:?}");
        let targets = place.targets("sibling");
        assert_ended(&place, "lenient", "connect-by-mptcp", &targets, Refused(&["EPROTONOSUPPORT"], ""));
        // A bulkhead without a list of ports does not need the layer.
        assert!(place.confinement("sibling")[0].missing.iter().all(|layer| layer != "landlock_tcp"));
    }
}
