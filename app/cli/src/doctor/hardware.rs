//! Checks of the NPUs of a machine: what sysfs, the node and the kernel log say, then a trial.

use super::kernel_log::{self, HOW_TO_READ, Source};
use super::machine::Machine;
use super::{Check, List, Remedy, Status, Subject, trial};
use crate::error::CliError;
use crate::npu::blocking_findings;
use npuhal_amdxdna::discovery::{Finding, FoundNpu, MODULE, check, enumerate};
use npuhal_registry::{DeviceAddress, DeviceUri};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Examines every NPU of `machine`, or the one that is `pinned`.
pub(super) fn examine(
    list: &mut List,
    machine: &Machine,
    pinned: Option<&DeviceUri>,
    log: Option<&Path>,
) -> Result<Subject, CliError> {
    let all = enumerate(machine.roots());
    let examined: Vec<Examined<'_>> = all
        .iter()
        .filter(|npu| pinned.is_none_or(|uri| is_meant(npu, &uri.address)))
        .map(|npu| Examined {
            npu,
            findings: check(machine.roots(), machine.identity(), npu),
            is_alone: all.len() == 1,
        })
        .collect();
    list.checks.push(presence(machine, &all, &examined, pinned));
    let served: Vec<&Examined<'_>> = examined.iter().filter(|examined| examined.npu.silicon.is_some()).collect();
    if served.is_empty() {
        // A log that the user hands over is read whatever was found.
        if log.is_some() {
            examine_log(list, machine, log, &[])?;
        }
        return Ok(match pinned {
            Some(uri) => Subject::Npus(vec![uri.id()]),
            None => Subject::NoNpu,
        });
    }
    list.checks.extend([driver(machine, &served), access(machine, &served)]);
    list.checks.extend([sharing(&served), firmware(machine, &served), locked_memory(machine, &served)]);
    let holders: Vec<String> =
        served.iter().filter_map(|it| it.npu.node.as_deref()).flat_map(|node| machine.holders(node)).collect();
    examine_log(list, machine, log, &holders)?;
    trials(list, machine, &served, &holders);
    weigh_log_against_trials(list);
    Ok(Subject::Npus(served.iter().map(|examined| examined.npu.id.clone()).collect()))
}

fn examine_log(list: &mut List, machine: &Machine, log: Option<&Path>, holders: &[String]) -> Result<(), CliError> {
    match kernel_log::read(machine, log)? {
        Source::Log { name, text } => list.checks.push(kernel_log::check(machine, &name, &text, holders)),
        Source::Unreadable(reason) => {
            list.not_tried
                .push(format!("the kernel log cannot be read ({reason}); to have it examined: {HOW_TO_READ}"));
        }
    }
    Ok(())
}

struct Examined<'a> {
    npu: &'a FoundNpu,
    findings: Vec<Finding>,
    is_alone: bool,
}

impl Examined<'_> {
    fn prefix(&self) -> String {
        if self.is_alone { String::new() } else { format!("{}: ", self.npu.id) }
    }

    /// Findings of one kind, with the device's name in front where there are several.
    fn issues(&self, is_of_kind: fn(&Finding) -> bool) -> impl Iterator<Item = (&Finding, String)> {
        let of_kind = self.findings.iter().filter(move |finding| is_of_kind(finding));
        of_kind.map(|finding| (finding, format!("{}{finding}", self.prefix())))
    }
}

fn is_meant(npu: &FoundNpu, address: &DeviceAddress) -> bool {
    match address {
        DeviceAddress::Path { path, .. } => npu.pci_address == *path || npu.node.as_deref() == Some(Path::new(path)),
        _ => npu.id == address.to_string(),
    }
}

fn presence(machine: &Machine, all: &[FoundNpu], examined: &[Examined<'_>], pinned: Option<&DeviceUri>) -> Check {
    let mut check = Check::new("npu");
    for npu in all {
        let part = npu.silicon.map_or("not served", |silicon| silicon.facts().product);
        let name = npu.display_name.as_deref().map(|name| format!("\"{name}\", ")).unwrap_or_default();
        check.found.push(format!(
            "{} ({name}{part}, PCI {:04x} revision {:02x} at {})",
            npu.id, npu.pci_device, npu.pci_revision, npu.pci_address
        ));
    }
    for examined in examined.iter().filter(|examined| examined.npu.silicon.is_none()) {
        for finding in &examined.findings {
            let cpu = Remedy::advice("nothing to mend: models run on the CPU");
            check.add_issue(Status::Warn, finding.to_string(), [cpu]);
        }
    }
    match pinned {
        Some(uri) if examined.is_empty() => {
            let found = if all.is_empty() { "none" } else { &check.found.join(", ") };
            let issue = format!("wanted the device {}, found {found}", uri.id());
            let listing = Remedy::command("name a device that is here: npuhal devices", "npuhal devices");
            check.add_issue(Status::Fail, issue, [listing]);
        }
        None if all.is_empty() => {
            let nodes = fs::read_dir(machine.roots().dev.join("accel")).into_iter().flatten().count();
            let looked =
                if nodes == 0 { "no /dev/accel/accel* node, no NPU on the PCI bus" } else { "no NPU on the PCI bus" };
            let bios = Remedy::advice(
                "if the processor has an NPU (Ryzen 7040, 8040, AI 300, AI Max): switch it on in the BIOS (IPU or NPU)",
            );
            check.add_issue(Status::Warn, format!("no NPU found ({looked})"), [bios]);
        }
        _ => {}
    }
    check
}

fn driver(machine: &Machine, served: &[&Examined<'_>]) -> Check {
    let mut check = Check::new("driver");
    let version = machine.text(&format!("sys/module/{MODULE}/version")).map(|text| format!(" {}", text.trim()));
    let origin = match machine.is_module_out_of_tree() {
        Some(true) => ", out-of-tree",
        Some(false) => ", the kernel's own",
        None => "",
    };
    if machine.roots().sys.join("module").join(MODULE).exists() {
        check.found.push(format!("module {MODULE}{}{origin}", version.unwrap_or_default()));
    }
    if let Some(release) = machine.text("proc/sys/kernel/osrelease") {
        check.found.push(format!("Linux {}", release.trim()));
    }
    for examined in served {
        for (finding, issue) in examined.issues(is_of_driver) {
            let command = match finding {
                Finding::NoDriver { is_module_loaded: false } => format!("sudo modprobe {MODULE}"),
                Finding::NoDriver { .. } => format!("sudo dmesg | grep -i {MODULE}"),
                Finding::OtherDriver { name } => format!("sudo modprobe -r {name} && sudo modprobe {MODULE}"),
                Finding::NoNode { .. } => format!("sudo modprobe -r {MODULE} && sudo modprobe {MODULE}"),
                _ => format!("modinfo {MODULE}"),
            };
            let remedy = finding.remedy();
            let text = if remedy.is_empty() { "another version of the driver may serve it".to_owned() } else { remedy };
            check.add_issue(Status::Fail, issue, [Remedy::command(text, command)]);
        }
    }
    check
}

fn is_of_driver(finding: &Finding) -> bool {
    matches!(
        finding,
        Finding::NoDriver { .. } | Finding::OtherDriver { .. } | Finding::OtherQueues { .. } | Finding::NoNode { .. }
    )
}

fn access(machine: &Machine, served: &[&Examined<'_>]) -> Check {
    let mut check = Check::new("access");
    for examined in served {
        if let Some(node) = &examined.npu.node
            && let Ok(metadata) = fs::metadata(node)
        {
            let mode = metadata.permissions().mode() & 0o777;
            check.found.push(format!("{} (mode {mode:o}, group {})", node.display(), metadata.gid()));
        }
        for (finding, issue) in examined.issues(|finding| matches!(finding, Finding::NoAccess { .. })) {
            let command = match finding {
                Finding::NoAccess { owner_group, group_may: true, .. } => {
                    format!("sudo usermod -aG {owner_group} $USER")
                }
                _ => finding.remedy(),
            };
            let issue = format!("{issue} (EACCES; programs that do not tell this apart say that there is no NPU)");
            check.add_issue(Status::Fail, issue, [Remedy::command(finding.remedy(), command)]);
        }
    }
    if check.found.is_empty() {
        check.found.push("no node to open".to_owned());
    }
    if machine.identity().user == 0 {
        check.found.push("the user is root".to_owned());
    }
    check
}

fn sharing(served: &[&Examined<'_>]) -> Check {
    let mut check = Check::new("memory_sharing");
    let is_of_sharing = |finding: &Finding| matches!(finding, Finding::VirtualMachine | Finding::NoIommu { .. });
    for examined in served {
        for (finding, issue) in examined.issues(is_of_sharing) {
            let remedy = match finding {
                Finding::VirtualMachine => Remedy::advice(
                    "run on the machine itself: a virtual IOMMU that shares address spaces does not exist for this device",
                ),
                _ => Remedy::command(finding.remedy(), "cat /proc/cmdline"),
            };
            check.add_issue(Status::Fail, issue, [remedy]);
        }
    }
    if check.status == Status::Ok { check.found("behind an IOMMU") } else { check }
}

fn firmware(machine: &Machine, served: &[&Examined<'_>]) -> Check {
    let mut check = Check::new("firmware");
    for examined in served {
        let Examined { npu, findings, .. } = examined;
        match &npu.firmware {
            Some(version) => check.found.push(format!("{} runs {version}", npu.id)),
            None => check.found.push(format!("{}: the driver reports no version", npu.id)),
        }
        let folder = format!("lib/firmware/amdnpu/{:04x}_{:02x}", npu.pci_device, npu.pci_revision);
        let mut files: Vec<String> = fs::read_dir(machine.path(&folder))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|file| file.file_name().into_string().ok())
            .collect();
        files.sort();
        if !files.is_empty() {
            check.found.push(format!("/{folder}: {}", files.join(", ")));
        }
        for finding in findings {
            let status = match finding {
                Finding::FirmwareDenied { .. } => Status::Fail,
                Finding::FirmwareTooOld { .. } => Status::Warn,
                _ => continue,
            };
            let remedy = Remedy::command(finding.remedy(), format!("ls -l /{folder}"));
            check.add_issue(status, format!("{}{finding}", examined.prefix()), [remedy]);
        }
    }
    check
}

fn locked_memory(machine: &Machine, served: &[&Examined<'_>]) -> Check {
    let limit = machine.identity().memlock_bytes;
    let found = limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    let mut check = Check::new("locked_memory").found(found);
    let finding = served.iter().flat_map(|it| &it.findings).find(|it| matches!(it, Finding::LowMemlock { .. }));
    if let Some(finding) = finding {
        let issue = format!(
            "{finding}; npuhal does not lock the device heap, but other programs do (64 MiB), fail with EAGAIN and say \
             \"no device\""
        );
        let remedy = Remedy::command(
            "raise it for good in /etc/security/limits.d/99-npu.conf (`* - memlock unlimited`) and log in again; for this \
             shell: ulimit -l unlimited",
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/99-npu.conf",
        );
        check.add_issue(Status::Warn, issue, [remedy]);
    }
    check
}

/// Opens what can be opened.
fn trials(list: &mut List, machine: &Machine, served: &[&Examined<'_>], holders: &[String]) {
    for examined in served {
        let id = &examined.npu.id;
        if !machine.is_this() {
            list.not_tried.push(format!("{id} was not opened: a directory describes it, it is not on this machine"));
        } else if let Some(unavailable) = blocking_findings(&examined.findings) {
            list.not_tried.push(format!("{id} was not opened: {}", unavailable.reason));
        } else {
            trial::examine_found(list, examined.npu, holders);
        }
    }
}

/// A context that could be made just now says more than the log of what went wrong before.
fn weigh_log_against_trials(list: &mut List) {
    let contexts: Vec<Status> = list.checks.iter().filter(|it| it.name == "context").map(|it| it.status).collect();
    let has_refusal = list.checks.iter().any(|it| it.name == "device" && it.status != Status::Ok);
    if contexts.is_empty() || has_refusal || contexts.iter().any(|status| *status != Status::Ok) {
        return;
    }
    if let Some(log) = list.checks.iter_mut().find(|it| it.name == "kernel_log" && it.status == Status::Fail) {
        log.status = Status::Warn;
        log.found.push("a context could be made all the same".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_weighed_against_what_works_now() {
        let check = |name, status| match status {
            Status::Ok => Check::new(name),
            _ => Check::new(name).with_issue(status, "bad", []),
        };
        let weighed = |device, context: Option<Status>| {
            let mut list = List::default();
            list.checks.extend([check("kernel_log", Status::Fail), check("device", device)]);
            list.checks.extend(context.map(|status| check("context", status)));
            weigh_log_against_trials(&mut list);
            list.checks[0].status
        };
        assert_eq!(weighed(Status::Ok, Some(Status::Ok)), Status::Warn);
        assert_eq!(weighed(Status::Ok, Some(Status::Fail)), Status::Fail);
        assert_eq!(weighed(Status::Fail, None), Status::Fail);
    }
}
