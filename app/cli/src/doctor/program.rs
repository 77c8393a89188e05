//! Checks of the system and of what npuhal itself needs: kernels, models, the server's port.

use super::kernels;
use super::machine::Machine;
use super::{Check, List, Remedy, Status};
use crate::terminal::bytes_text;
use npuhal_models::store::{Presence, Stored, StoredKind};
use npuhal_models::{Catalogue, Store};
use std::path::Path;

/// The server's default port.
const PORT: u16 = 8000;

/// Operating system and processor.
pub(super) fn system(machine: &Machine) -> Check {
    let mut check = Check::new("system");
    let cpu = machine.text("proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        let line = cpu.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    if machine.is_this() {
        let (os, processor) = (std::env::consts::OS, std::env::consts::ARCH);
        check.found.push(format!("{os} on {processor}"));
        if (os, processor) != ("linux", "x86_64") {
            let issue = format!("wanted Linux on x86_64, found {os} on {processor}: there are no NPU drivers for it");
            check.add_issue(Status::Fail, issue, [Remedy::advice("use a PC with an AMD processor and Linux")]);
        }
    }
    check.found.extend(field("model name"));
    match field("flags") {
        Some(flags) if !flags.split_whitespace().any(|flag| flag == "avx2") => {
            let remedy = Remedy::advice("in a virtual machine, pass the host's processor through");
            let issue = "wanted a processor with AVX2, found one without: the CPU backend is several times slower";
            check.add_issue(Status::Warn, issue, [remedy]);
        }
        Some(_) => check.found.push("AVX2".to_owned()),
        None => {}
    }
    check
}

/// Kernels, models, port.
pub(super) fn examine(list: &mut List, machine: &Machine, models_dir: Option<&Path>) {
    if machine.is_this() || models_dir.is_some() {
        models_and_kernels(list, machine, models_dir);
    } else {
        list.not_tried
            .push("models and kernels: they are the user's, and the tree names no folder (--models-dir)".to_owned());
    }
    match port(machine) {
        Some(check) => list.checks.push(check),
        None => list.not_tried.push("the server's port: there is no proc/net/tcp".to_owned()),
    }
}

fn models_and_kernels(list: &mut List, machine: &Machine, models_dir: Option<&Path>) {
    let check = Check::new("models");
    let catalogue = Catalogue::builtin();
    let store = match Store::locate(models_dir) {
        Ok(store) => store,
        Err(error) => {
            let remedy = Remedy::advice("name a folder: --models-dir DIR, or NPUHAL_MODELS");
            list.checks.push(check.with_issue(Status::Warn, error.to_string(), [remedy]));
            return;
        }
    };
    kernels::examine(list, store.folder(), machine.is_this());
    let check = check.found(store.folder().display().to_string());
    let default = &catalogue.default_entry().name;
    let pull = |name: &str| Remedy::command(format!("npuhal pull {name}"), format!("npuhal pull {name}"));
    let stored = match store.list(catalogue) {
        Ok(stored) => stored,
        Err(error) => {
            let remedy = Remedy::advice("make the folder readable, or name another: --models-dir DIR");
            list.checks.push(check.with_issue(Status::Warn, error.to_string(), [remedy]));
            return;
        }
    };
    let usable: Vec<&Stored> = stored.iter().filter(|model| is_whole(model)).collect();
    let mut check = check;
    for model in &stored {
        match &model.kind {
            StoredKind::Catalogued(Presence::WrongSize { found_bytes }) => {
                let issue = format!("{}: the file has another size ({})", model.name, bytes_text(*found_bytes));
                check.add_issue(Status::Warn, issue, [pull(&model.name)]);
            }
            StoredKind::Unfinished { size_bytes } => {
                let here = bytes_text(model.len_bytes);
                let issue = format!("{}: unfinished download, {here} of {}", model.name, bytes_text(*size_bytes));
                check.add_issue(Status::Warn, issue, [pull(&model.name)]);
            }
            _ => check.found.push(model.name.clone()),
        }
    }
    if usable.is_empty() && check.issues.is_empty() {
        check.add_issue(Status::Warn, "no model is here", [pull(default)]);
    }
    let is_default = |model: &&Stored| model.name == *default;
    list.model = match usable.iter().any(is_default) {
        true => None,
        false => usable.first().map(|model| match model.kind {
            StoredKind::Foreign => model.path.display().to_string(),
            _ => model.name.clone(),
        }),
    };
    list.checks.push(check);
}

fn is_whole(model: &Stored) -> bool {
    matches!(model.kind, StoredKind::Catalogued(Presence::Verified | Presence::Unverified) | StoredKind::Foreign)
}

/// Whether somebody listens on the server's port; `None` where the machine does not say.
fn port(machine: &Machine) -> Option<Check> {
    let tables = ["proc/net/tcp", "proc/net/tcp6"].map(|name| machine.text(name));
    if tables.iter().all(Option::is_none) {
        return None;
    }
    let check = Check::new("port");
    if tables.iter().flatten().any(|table| is_listening(table, PORT)) {
        let remedy = Remedy::advice("only a server needs it: end the other program, or choose another port");
        let issue = format!("wanted port {PORT} free for the server, found a program that listens on it");
        return Some(check.with_issue(Status::Warn, issue, [remedy]));
    }
    Some(check.found(format!("{PORT} is free")))
}

/// `/proc/net/tcp`: a line for each socket, local address as `hex:hex-port` in the second column, state `0A` for listening
/// in the fourth.
fn is_listening(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let local = columns.get(1).and_then(|address| address.rsplit_once(':'));
        let is_port = local.is_some_and(|(_, hex)| u16::from_str_radix(hex, 16) == Ok(port));
        is_port && columns.get(3) == Some(&"0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_sockets_are_told_from_connections() {
        let table = "  sl  local_address rem_address   st\n\
                     \x20  0: 0100007F:1F40 00000000:0000 0A\n\
                     \x20  1: 0100007F:1F41 0100007F:1F42 01\n";
        assert!(is_listening(table, 8000));
        assert!(!is_listening(table, 8001), "a connection");
        assert!(!is_listening(table, 8003) && !is_listening("", 8000) && !is_listening("x\ny z", 8000));
    }
}
