//! The kernel log: where it is, and what its lines about the NPU mean.
//!
//! The lines are those that drivers print and users report; `docs/doctor.md` names the reports.

use super::machine::{Machine, tail};
use super::{Check, Remedy, Status};
use crate::error::CliError;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// More than a boot's worth.
const LOG_LIMIT_BYTES: u64 = 16 << 20;
/// Where distributions keep the log of this boot, or of all.
const LOG_FILES: [&str; 4] = ["var/log/dmesg", "var/log/kern.log", "var/log/messages", "dmesg"];
/// How to read it where it may not be read.
pub(super) const HOW_TO_READ: &str = "sudo dmesg > npu.log; npuhal doctor --kernel-log npu.log";

/// The log, or why there is none.
pub(super) enum Source {
    Log { name: String, text: String },
    Unreadable(String),
}

/// The log of `machine`; a file that the user named has to be readable.
pub(super) fn read(machine: &Machine, named: Option<&Path>) -> Result<Source, CliError> {
    if let Some(path) = named {
        let text = tail(path, LOG_LIMIT_BYTES)
            .map_err(|error| CliError::Usage(format!("--kernel-log {}: {error}", path.display())))?;
        return Ok(Source::Log { name: path.display().to_string(), text });
    }
    let mut reasons = Vec::new();
    if machine.is_this() {
        match read_kmsg() {
            Ok(text) => return Ok(Source::Log { name: "/dev/kmsg".to_owned(), text }),
            Err(error) => reasons.push(format!("/dev/kmsg: {error}")),
        }
    }
    for name in LOG_FILES {
        match tail(&machine.path(name), LOG_LIMIT_BYTES) {
            Ok(text) if !text.is_empty() => {
                return Ok(Source::Log { name: machine.path(name).display().to_string(), text });
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => reasons.push(format!("/{name}: {error}")),
        }
    }
    if reasons.is_empty() {
        reasons.push(format!("none of {} is there", LOG_FILES.join(", ")));
    }
    Ok(Source::Unreadable(reasons.join("; ")))
}

/// The kernel's ring buffer: one record a read, `priority,sequence,time,flags;text`, then lines with a leading blank.
fn read_kmsg() -> std::io::Result<String> {
    let nonblocking = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut kmsg = OpenOptions::new().read(true).custom_flags(nonblocking).open("/dev/kmsg")?;
    let mut text = String::new();
    let mut record = [0; 8192];
    while (text.len() as u64) < LOG_LIMIT_BYTES {
        match kmsg.read(&mut record) {
            Ok(0) => break,
            Ok(len) => {
                let record = String::from_utf8_lossy(&record[..len]);
                let line = record.lines().next().unwrap_or_default();
                text.push_str(line.split_once(';').map_or(line, |(_, message)| message));
                text.push('\n');
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // Overwritten meanwhile: the next read goes on with the oldest record there is.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(text)
}

/// How an error line is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Says what is wrong.
    Cause,
    /// Follows from something else: told only where no cause was logged.
    Consequence,
    /// Means nothing.
    Harmless,
}

/// Lines with all of `marks`.
struct Signature {
    marks: &'static [&'static str],
    kind: Kind,
    status: Status,
    meaning: &'static str,
    /// Advice, and the command it starts with, where there is one.
    remedies: &'static [(&'static str, Option<&'static str>)],
}

impl Signature {
    const fn cause(
        marks: &'static [&'static str],
        meaning: &'static str,
        remedies: &'static [(&'static str, Option<&'static str>)],
    ) -> Self {
        Self { marks, kind: Kind::Cause, status: Status::Fail, meaning, remedies }
    }

    const fn consequence(
        marks: &'static [&'static str],
        meaning: &'static str,
        remedies: &'static [(&'static str, Option<&'static str>)],
    ) -> Self {
        Self { marks, kind: Kind::Consequence, status: Status::Fail, meaning, remedies }
    }

    const fn warning(self) -> Self {
        Self { status: Status::Warn, ..self }
    }
}

const IOMMU_ON: (&str, Option<&str>) = (
    "switch the IOMMU (AMD-Vi) on in the BIOS and boot without amd_iommu=off or iommu=off; in a virtual machine there is \
     nothing to switch on: run on the machine itself",
    Some("cat /proc/cmdline"),
);
const ONE_SOURCE: (&str, Option<&str>) = (
    "take driver and firmware from one source: the kernel's driver with linux-firmware, or AMD's package (xdna-driver), \
     which brings both; then shut down fully and start again",
    Some("ls -l /lib/firmware/amdnpu/*"),
);
const OUT_OF_TREE: (&str, Option<&str>) = (
    "install AMD's out-of-tree driver together with the firmware that comes with it (github.com/amd/xdna-driver), then \
     reboot",
    Some("modinfo -F filename amdxdna"),
);
const RELOAD: (&str, Option<&str>) = ("reload the driver", Some("sudo modprobe -r amdxdna && sudo modprobe amdxdna"));

/// What is known, the most telling first: a line belongs to the first signature that it fits.
static SIGNATURES: [Signature; 22] = [
    Signature::cause(
        &["SVA bind device failed", "ret -19"],
        "the process's memory cannot be shared with the NPU: the IOMMU offers no shared virtual addressing (ENODEV)",
        &[IOMMU_ON],
    ),
    Signature::cause(
        &["SVA bind device failed", "ret -28"],
        "the process's memory cannot be shared with the NPU: the kernel has no address-space numbers for it (ENOSPC), as \
         kernels before 6.10, which cannot do this on AMD's IOMMU",
        &[("use Linux 6.10 or newer; the driver is part of it from 6.14 on", Some("uname -r"))],
    ),
    Signature::cause(
        &["SVA bind device failed", "ret -95"],
        "the process's memory cannot be shared with the NPU: this kernel has shared virtual addressing switched off \
         (EOPNOTSUPP). Some 6.17 and 6.18 kernels have, by the change \"iommu: disable SVA when CONFIG_X86 is set\"; so has \
         an IOMMU in passthrough mode with drivers before mid-2026",
        &[("use a kernel that has it on again, and boot without iommu=pt", Some("uname -r"))],
    ),
    Signature::cause(
        &["SVA bind device failed"],
        "the process's memory cannot be shared with the NPU (SVA)",
        &[IOMMU_ON],
    ),
    Signature::cause(
        &["Enable PASID failed"],
        "the IOMMU has no address-space numbers (PASID) for the NPU; a virtual machine's never has",
        &[IOMMU_ON],
    ),
    Signature::cause(
        &["SVA get pasid failed"],
        "the IOMMU has no address-space numbers (PASID) for the NPU; a virtual machine's never has",
        &[IOMMU_ON],
    ),
    Signature::cause(
        &["Incompatible firmware protocol"],
        "the driver does not speak the firmware's protocol: the major version is another",
        &[(
            "update the kernel, or install AMD's out-of-tree driver: newer drivers ask for a least version only; or go \
                 back to the firmware that fits (protocol 6.12 on Strix Halo: 1.0.20.31 and older)",
            Some("ls -l /lib/firmware/amdnpu/*"),
        )],
    ),
    Signature::cause(
        &["Firmware minor version smaller than supported"],
        "the firmware's protocol is older than the driver needs: the minor version is too small",
        &[("update linux-firmware, then shut down fully and start again", Some("ls -l /lib/firmware/amdnpu/*"))],
    ),
    Signature::cause(
        &["below minimum"],
        "the firmware's protocol is older than the driver needs",
        &[("update linux-firmware, then shut down fully and start again", Some("ls -l /lib/firmware/amdnpu/*"))],
    ),
    Signature::cause(
        &["Invalid mbox magic"],
        "the firmware is not alive: what was loaded is not a firmware for this driver",
        &[ONE_SOURCE],
    ),
    Signature::cause(
        &["failed to request_firmware"],
        "the driver found no firmware that it could load",
        &[(
            "install the package linux-firmware (files amdnpu/*/npu.sbin), then reboot",
            Some("ls -l /lib/firmware/amdnpu/*"),
        )],
    ),
    Signature::cause(
        &["Direct firmware load for amdnpu"],
        "the driver found no firmware that it could load",
        &[(
            "install the package linux-firmware (files amdnpu/*/npu.sbin), then reboot",
            Some("ls -l /lib/firmware/amdnpu/*"),
        )],
    ),
    Signature::cause(
        &["0x2000003"],
        "all hardware contexts of the NPU were taken (6 on npu1, 16 on npu4 to npu6, over all programs), or no column was \
         free",
        &[("close the other programs that use the NPU", Some("sudo fuser -v /dev/accel/accel*"))],
    ),
    Signature::cause(
        &["Map host buffer failed"],
        "the firmware refused the device heap, so that no context could be made",
        &[ONE_SOURCE],
    ),
    Signature::consequence(
        &["Init hwctx failed"],
        "the driver lists the NPU, but making a hardware context on it fails (CREATE_HWCTX)",
        &[OUT_OF_TREE],
    ),
    Signature::cause(
        &["aie2_set_cmd_timeout"],
        "a command did not end in time, and the driver threw its context away",
        &[RELOAD],
    )
    .warning(),
    Signature::cause(
        &["Wait for completion timeout"],
        "the firmware did not answer a message in time",
        &[RELOAD, ONE_SOURCE],
    )
    .warning(),
    Signature::cause(
        &["IO_PAGE_FAULT"],
        "the NPU touched memory that it was not given: a program handed it a wrong address",
        &[RELOAD],
    )
    .warning(),
    Signature::consequence(
        &["smu cmd"],
        "the NPU does not answer the power controller",
        &[("shut the machine down fully (no restart), and update the BIOS and linux-firmware", None)],
    ),
    Signature::consequence(&["firmware is not alive"], "the firmware is not alive", &[ONE_SOURCE]),
    Signature::consequence(
        &["probe", "failed"],
        "the driver could not start the NPU",
        &[("read the lines before it", Some("sudo dmesg | grep -i amdxdna"))],
    ),
    Signature {
        marks: &["cfg_debug_bo"],
        kind: Kind::Harmless,
        status: Status::Ok,
        meaning: "a debug buffer that older drivers do not know",
        remedies: &[],
    },
];

/// A mailbox message that ended badly. Reported with commands that end in ABORT, and also without any harm.
const CALLBACK: &str = "Message callback ret -22";
/// Lines that other lines explain.
const FOLLOW_UPS: [&str; 5] = [
    "Allocate AIE resource failed",
    "Alloc hw resource failed",
    "start npu failed",
    "Power off failed",
    "Create context failed",
];

/// What the log says about the NPU since the driver last started well.
pub(super) fn check(machine: &Machine, name: &str, log: &str, holders: &[String]) -> Check {
    let lines = relevant(log);
    let mut check = Check::new("kernel_log");
    check.found.push(match lines.len() {
        0 => format!("{name}: no error of the NPU's driver"),
        1 => format!("{name}: 1 error line of the NPU's driver"),
        count => format!("{name}: {count} error lines of the NPU's driver"),
    });
    let hits: Vec<(&Signature, &str)> = SIGNATURES
        .iter()
        .filter_map(|signature| {
            let is_mine = |line: &&&str| signature_of(line).is_some_and(|other| std::ptr::eq(other, signature));
            lines.iter().rev().find(is_mine).map(|line| (signature, *line))
        })
        .collect();
    let has_cause = hits.iter().any(|(signature, _)| signature.kind == Kind::Cause);
    for (signature, line) in &hits {
        if signature.kind == Kind::Harmless || (signature.kind == Kind::Consequence && has_cause) {
            continue;
        }
        let mut remedies: Vec<Remedy> = signature.remedies.iter().map(|remedy| as_remedy(*remedy)).collect();
        let mut status = signature.status;
        let mut issue = format!("{} (logged: {})", signature.meaning, message(line));
        if signature.marks == ["0x2000003"] {
            (status, issue) = exhaustion(issue, holders);
            if !holders.is_empty() {
                remedies = vec![Remedy::command(
                    format!("close one of: {}", holders.join(", ")),
                    "sudo fuser -v /dev/accel/accel*",
                )];
            }
        }
        check.add_issue(status, issue, remedies);
        if signature.kind == Kind::Consequence {
            break;
        }
    }
    if let Some(line) = lines.iter().rev().find(|line| line.contains(CALLBACK)) {
        add_callback(&mut check, machine, log, line);
    }
    let unknown = lines.iter().rev().find(|line| is_unknown(line));
    if let Some(line) = unknown.filter(|_| check.status == Status::Ok) {
        let issue = format!("an error of the driver that npuhal does not know (logged: {})", message(line));
        let all = Remedy::command("read what else it says", "sudo dmesg | grep -i amdxdna");
        check.add_issue(Status::Warn, issue, [all]);
    }
    check
}

/// Contexts that are taken now are a failure; that they were once is history.
fn exhaustion(issue: String, holders: &[String]) -> (Status, String) {
    if holders.is_empty() {
        (Status::Warn, format!("{issue}; no program that this user can see holds the NPU now"))
    } else {
        (Status::Fail, format!("{issue}; the NPU is held by {}", holders.join(", ")))
    }
}

fn add_callback(check: &mut Check, machine: &Machine, log: &str, line: &str) {
    let out_of_tree = machine.is_module_out_of_tree();
    let is_in_tree = !out_of_tree.unwrap_or_else(|| log.contains("amdxdna: loading out-of-tree module"));
    let logged = message(line);
    // Older drivers print the second half; there the command ended well.
    if is_in_tree && !line.contains("disable irq") {
        let issue = format!(
            "the kernel's own driver lists the NPU, but the firmware refuses its messages: commands then end in \
             ERT_CMD_STATE_ABORT (logged: {logged})"
        );
        let chains = Remedy::advice(
            "or, as somebody reported for Linux 7.0 with firmware 1.0.0.63, without another driver: \
             echo N | sudo tee /sys/module/amdxdna/parameters/force_cmdlist",
        );
        check.add_issue(Status::Fail, issue, [as_remedy(OUT_OF_TREE), chains]);
    } else {
        let issue = format!(
            "the firmware answered a message with an error; it may be harmless, or commands may end in ABORT (logged: {logged})"
        );
        check.add_issue(Status::Warn, issue, [as_remedy(ONE_SOURCE)]);
    }
}

/// Lines of the driver, of the last boot, since the last time it started well.
fn relevant(log: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = Vec::new();
    for line in log.lines() {
        if line.contains("Linux version ") || line.contains("Initialized amdxdna_accel_driver") {
            lines.clear();
        } else if ["amdxdna", "xdna_mailbox", "amdnpu"].iter().any(|word| line.contains(word)) && is_error(line) {
            lines.push(line);
        }
    }
    lines
}

fn is_error(line: &str) -> bool {
    ["ERROR", "ailed", "FAULT", "timeout", "Invalid", "ncompatible", "ret -", "not alive", "below minimum", "smaller than"]
        .iter()
        .any(|word| line.contains(word))
        // "module verification failed" is about signatures, and comes with every out-of-tree module.
        && !line.contains("module verification failed")
}

fn signature_of(line: &str) -> Option<&'static Signature> {
    SIGNATURES.iter().find(|signature| signature.marks.iter().all(|mark| line.contains(mark)))
}

fn is_unknown(line: &str) -> bool {
    line.contains("ERROR")
        && signature_of(line).is_none()
        && !line.contains(CALLBACK)
        && !FOLLOW_UPS.iter().any(|follow_up| line.contains(follow_up))
}

fn as_remedy((text, command): (&str, Option<&str>)) -> Remedy {
    command.map_or_else(|| Remedy::advice(text), |command| Remedy::command(text, command))
}

/// The line from the function's name on, without stamps.
fn message(line: &str) -> &str {
    let start = line.find("amdxdna").or_else(|| line.find("xdna_mailbox")).unwrap_or(0);
    let message = &line[start..];
    let message = message.split_once("*ERROR* ").map_or(message, |(_, rest)| rest);
    message.trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as drivers print them, and the first mark of the signature that explains each.
    const LINES: [(&str, &str); 14] = [
        (
            "amdxdna 0000:c5:00.1: [drm] *ERROR* amdxdna_drm_open: SVA bind device failed, ret -19",
            "SVA bind device failed",
        ),
        ("amdxdna 0000:05:00.1: aie2_init: Enable PASID failed, ret -19", "Enable PASID failed"),
        ("aie2_get_mgmt_chann_info: Invalid mbox magic 0x30ec000", "Invalid mbox magic"),
        ("aie2_hw_start: firmware is not alive", "firmware is not alive"),
        ("aie2_check_protocol: Incompatible firmware protocol major 7 minor 3", "Incompatible firmware protocol"),
        ("Firmware minor version smaller than supported", "Firmware minor version smaller than supported"),
        ("Firmware 5.6 below minimum 5.7", "below minimum"),
        ("aie2_init: failed to request_firmware amdnpu/1502_00/npu.sbin, ret -2", "failed to request_firmware"),
        ("aie2_send_mgmt_msg_wait: command opcode 0x2 failed, status 0x2000003", "0x2000003"),
        ("amdxdna_drm_create_hwctx_ioctl: Init hwctx failed, ret -22", "Init hwctx failed"),
        ("aie2_smu_exec: smu cmd 4 failed, 0xff", "smu cmd"),
        ("amdxdna 0000:c6:00.1: probe with driver amdxdna failed with error -22", "probe"),
        ("xdna_send_msg_wait: Wait for completion timeout", "Wait for completion timeout"),
        ("aie2_hwctx_cfg_debug_bo: Get bo 4 failed", "cfg_debug_bo"),
    ];

    #[test]
    fn every_known_line_has_its_signature() {
        for (line, mark) in LINES {
            assert_eq!(signature_of(line).map(|signature| signature.marks[0]), Some(mark), "{line}");
            assert!(is_error(line), "{line}");
        }
        for harmless in [
            "amdxdna: loading out-of-tree module taints kernel.",
            "amdxdna: module verification failed: signature and/or required key missing - tainting kernel",
            "amdxdna 0000:c5:00.1: enabling device (0000 -> 0002)",
            "amdxdna 0000:c4:00.1: [drm] Load firmware amdnpu/17f0_11/npu_7.sbin",
        ] {
            assert!(relevant(harmless).is_empty(), "{harmless}");
        }
    }

    #[test]
    fn every_signature_says_what_to_do() {
        for signature in &SIGNATURES {
            assert!(!signature.meaning.is_empty());
            assert_eq!(signature.remedies.is_empty(), signature.kind == Kind::Harmless, "{}", signature.meaning);
        }
    }

    #[test]
    fn the_logged_line_is_shown_without_stamps() {
        let line =
            "[ 2497.518269] amdxdna 0000:c5:00.1: [drm] *ERROR* amdxdna_drm_open: SVA bind device failed, ret -19";
        assert_eq!(message(line), "amdxdna_drm_open: SVA bind device failed, ret -19");
        assert_eq!(message("words"), "words");
        assert_eq!(
            message("[1.0] xdna_mailbox.145: Message callback ret -22\r"),
            "xdna_mailbox.145: Message callback ret -22"
        );
    }

    #[test]
    fn the_ring_buffer_is_read_without_waiting_where_it_may_be_read() {
        if let Ok(text) = read_kmsg() {
            assert!(text.ends_with('\n') || text.is_empty());
            let has_header = |line: &str| line.split(',').next().is_some_and(|word| word.parse::<u32>().is_ok());
            assert!(
                text.lines().filter(|line| has_header(line)).count() * 10 <= text.lines().count(),
                "headers are left"
            );
        }
    }
}
