//! Reads the value of `sandbox.network`, which is a boolean or a table of permitted connections. Reports unknown keys
//! and invalid ports. `relations/confinement.rs` checks rules that involve other keys, and the keeper enforces the
//! permissions.

use toml::de::{DeTable, DeValue};

use super::{Field, TableReader};
use crate::Network;
use crate::defaults::TCP_PORTS_MAX;
use crate::diagnostics::{nearest, shown};
use crate::values::{self, LabelledKey, ValueError};

const TCP_PORTS: &str = "tcp_ports";
const UDP: &str = "udp";

impl TableReader<'_, '_> {
    /// Reads the value of `network`. If the value is a table, any problem in the table makes the whole value invalid.
    pub(crate) fn network(&mut self, name: &str) -> Field<Network> {
        self.read_partly(name, |reader, key, value| match value.get_ref() {
            DeValue::Boolean(true) => Ok(Some(Network::All)),
            DeValue::Boolean(false) => Ok(Some(Network::None)),
            DeValue::Table(table) => reader.connections(key, table),
            other => Err(values::wrong_type(key, "`true`, `false` or a table", other)),
        })
    }

    fn connections(&mut self, key: &LabelledKey, table: &DeTable<'_>) -> Result<Option<Network>, ValueError> {
        let mut is_valid = true;
        for (name, _) in table.iter().filter(|(name, _)| ![TCP_PORTS, UDP].contains(&&**name.get_ref())) {
            let help = match nearest(name.get_ref(), [TCP_PORTS, UDP]) {
                Some(key) => format!("did you mean `{key}`?"),
                None => format!("valid keys: {TCP_PORTS}, {UDP}"),
            };
            let message = format!("unknown key `{}` in `{}`", shown(name.get_ref()), key.label);
            self.report_error(name.span(), ValueError::new(message, help));
            is_valid = false;
        }
        let udp = match table.get(UDP) {
            Some(value) => {
                let read = match value.get_ref() {
                    DeValue::Boolean(udp) => Ok(*udp),
                    other => {
                        let found = values::type_name(other);
                        let message = format!("`{}.{UDP}` must be `true` or `false`, not {found}", key.label);
                        Err(ValueError::new(message, "write `udp = false`"))
                    }
                };
                self.ok_or_report(value.span(), read)
            }
            None => Some(false),
        };
        let Some(value) = table.get(TCP_PORTS) else {
            if !is_valid {
                return Ok(None);
            }
            let message = format!("`{}` has no `{TCP_PORTS}`", key.label);
            let help = "write `network = { tcp_ports = [443] }`; `[]` permits no TCP connections, and `network = true` \
                        permits all connections";
            return Err(ValueError::new(message, help));
        };
        let DeValue::Array(array) = value.get_ref() else {
            let found = values::type_name(value.get_ref());
            let message = format!("`{}.{TCP_PORTS}` must be an array of numbers, not {found}", key.label);
            self.report_error(value.span(), ValueError::new(message, "write `tcp_ports = [443]`"));
            return Ok(None);
        };
        if let Some(beyond) = array.get(TCP_PORTS_MAX) {
            let message = format!("`{}.{TCP_PORTS}` has more than {TCP_PORTS_MAX} ports", key.label);
            let help = "remove ports, or write `network = true` for all connections";
            self.report_error(beyond.span(), ValueError::new(message, help));
            is_valid = false;
        }
        let mut tcp_ports = Vec::new();
        for (index, element) in array.iter().take(TCP_PORTS_MAX).enumerate() {
            let label = format!("{}.{TCP_PORTS}[{index}]", key.label);
            match values::port(&label, element.get_ref()) {
                Ok(port) if tcp_ports.contains(&port) => {
                    let message = format!("`{}.{TCP_PORTS}` contains {port} twice", key.label);
                    self.report_error(element.span(), ValueError::new(message, "remove one"));
                    is_valid = false;
                }
                Ok(port) => tcp_ports.push(port),
                Err(error) => {
                    self.report_error(element.span(), error);
                    is_valid = false;
                }
            }
        }
        Ok(udp.filter(|_| is_valid).map(|udp| Network::Connections { tcp_ports, udp }))
    }
}
