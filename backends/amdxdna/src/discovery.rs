//! Finding NPUs, and saying why one can or cannot be used.
//!
//! Nothing here opens a device. Enumeration reads sysfs only; checking adds the node's permissions and what the machine
//! says about IOMMU and virtualisation. All roots are injectable.

use crate::firmware::{FirmwareVerdict, FirmwareVersion, judge};
use crate::silicon::{PCI_VENDOR, Silicon, is_later_part};
use npuhal_core::card::{DeviceCard, DriverCard};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Name of the kernel module, and of the directory of its PCI driver.
pub const MODULE: &str = "amdxdna";
/// Locked memory that the documented set-up has: enough for a device heap and lent weights.
const MEMLOCK_WANTED_BYTES: u64 = 64 << 20;

/// Where the machine's pseudo file systems are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// `/etc`, for the names of groups.
    pub etc: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), proc: "/proc".into(), etc: "/etc".into() }
    }
}

impl Roots {
    /// All of them inside one directory.
    #[must_use]
    pub fn inside(directory: &Path) -> Self {
        Self {
            sys: directory.join("sys"),
            dev: directory.join("dev"),
            proc: directory.join("proc"),
            etc: directory.join("etc"),
        }
    }
}

/// Who asks for access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Effective user.
    pub user: u32,
    /// Effective group and supplementary groups.
    pub groups: Vec<u32>,
    /// Limit of locked memory in bytes; `None` for no limit.
    pub memlock_bytes: Option<u64>,
    /// Whether this is the process itself, so that the kernel can be asked: it also knows of access lists.
    pub is_self: bool,
}

impl Identity {
    /// The process's own.
    #[must_use]
    pub fn current() -> Self {
        use rustix::process::{Resource, getegid, geteuid, getgroups, getrlimit};
        let mut groups = vec![getegid().as_raw()];
        groups.extend(getgroups().into_iter().flatten().map(rustix::process::Gid::as_raw));
        groups.sort_unstable();
        groups.dedup();
        Self { user: geteuid().as_raw(), groups, memlock_bytes: getrlimit(Resource::Memlock).current, is_self: true }
    }
}

/// One NPU on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundNpu {
    /// Id of its card, unique among those found, as it is written behind `--device`: `npu1`, `npu5`; for the second of a
    /// kind `amdxdna:` and its PCI address.
    pub id: String,
    /// PCI address.
    pub pci_address: String,
    /// PCI device id.
    pub pci_device: u16,
    /// PCI revision.
    pub pci_revision: u8,
    /// Part; `None` for one that this driver does not serve.
    pub silicon: Option<Silicon>,
    /// Driver that is bound to it.
    pub bound_driver: Option<String>,
    /// Device node.
    pub node: Option<PathBuf>,
    /// Display name that the driver reports.
    pub display_name: Option<String>,
    /// Firmware version that the driver reports.
    pub firmware: Option<String>,
    /// The driver's `device_type`: 0 for the kernel-mode queues that are spoken here.
    pub device_type: Option<u32>,
    has_iommu_group: bool,
}

impl FoundNpu {
    /// The card, as far as it is known without opening the device. `None` for a part that is not served.
    #[must_use]
    pub fn card(&self) -> Option<DeviceCard> {
        let silicon = self.silicon?;
        let facts = silicon.facts();
        Some(DeviceCard {
            id: self.id.clone(),
            name: self.display_name.clone().unwrap_or_else(|| format!("AMD NPU ({})", facts.product)),
            generation: silicon.generation(),
            is_virtual: false,
            columns: facts.columns - facts.unusable_columns,
            core_rows: facts.core_rows,
            memory_bytes: None,
            driver: self.bound_driver.as_ref().map(|name| DriverCard {
                name: name.clone(),
                version: "not asked".to_owned(),
                firmware: self.firmware.clone(),
            }),
            context_limit: Some(facts.context_limit),
            features: Vec::new(),
        })
    }
}

/// NPUs on the PCI bus, also those that cannot be used, by PCI address.
#[must_use]
pub fn enumerate(roots: &Roots) -> Vec<FoundNpu> {
    let mut found: BTreeMap<String, FoundNpu> = BTreeMap::new();
    let mut places = children(&roots.sys.join("bus/pci/drivers").join(MODULE));
    places.extend(children(&roots.sys.join("bus/pci/devices")));
    // A container may show nothing but the class.
    places.extend(children(&roots.sys.join("class/accel")).into_iter().map(|accel| accel.join("device")));
    for place in places {
        if let Some(npu) = read_npu(roots, &place) {
            found.entry(npu.pci_address.clone()).or_insert(npu);
        }
    }
    let mut npus: Vec<_> = found.into_values().collect();
    for i in 0..npus.len() {
        let is_taken = npus[..i].iter().any(|other| other.id == npus[i].id);
        if is_taken {
            npus[i].id = format!("{MODULE}:{}", npus[i].pci_address);
        }
    }
    npus
}

fn read_npu(roots: &Roots, directory: &Path) -> Option<FoundNpu> {
    let hex = |name: &str| {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    if hex("vendor")? != u32::from(PCI_VENDOR) {
        return None;
    }
    let pci_device = u16::try_from(hex("device")?).ok()?;
    let pci_revision = u8::try_from(hex("revision").unwrap_or(0)).ok()?;
    let silicon = Silicon::of_pci(pci_device, pci_revision);
    let is_npu = Silicon::ALL.iter().any(|part| part.facts().pci_device == pci_device) || is_later_part(pci_device);
    if !is_npu {
        return None;
    }
    let text = |name: &str| Some(fs::read_to_string(directory.join(name)).ok()?.trim().to_owned());
    let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    let pci_address = real.file_name()?.to_str()?.to_owned();
    let id = silicon.map_or_else(|| format!("pci-{pci_device:04x}"), |silicon| silicon.name().to_owned());
    Some(FoundNpu {
        id,
        bound_driver: bound_driver(roots, directory, &pci_address),
        node: node(roots, directory),
        display_name: text("vbnv"),
        firmware: text("fw_version"),
        device_type: text("device_type").and_then(|text| text.parse().ok()),
        has_iommu_group: directory.join("iommu_group").exists(),
        pci_address,
        pci_device,
        pci_revision,
        silicon,
    })
}

fn bound_driver(roots: &Roots, directory: &Path, pci_address: &str) -> Option<String> {
    if let Ok(target) = fs::read_link(directory.join("driver")) {
        return Some(target.file_name()?.to_str()?.to_owned());
    }
    let listed = roots.sys.join("bus/pci/drivers").join(MODULE).join(pci_address);
    listed.exists().then(|| MODULE.to_owned())
}

/// `/dev/accel/accelN` for the sub-directory `accel/accelN`.
fn node(roots: &Roots, directory: &Path) -> Option<PathBuf> {
    let mut names: Vec<String> = children(&directory.join("accel"))
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .filter(|name| name.starts_with("accel"))
        .collect();
    names.sort();
    Some(roots.dev.join("accel").join(names.first()?))
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Why an NPU cannot be used, or not as well as it could.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// A later part with another queue model.
    LaterPart {
        /// PCI device id.
        pci_device: u16,
    },
    /// A revision that is not known.
    UnknownRevision {
        /// PCI device id.
        pci_device: u16,
        /// PCI revision.
        pci_revision: u8,
    },
    /// No driver is bound.
    NoDriver {
        /// Whether the module is loaded and did not take the device.
        is_module_loaded: bool,
    },
    /// Another driver is bound.
    OtherDriver {
        /// Its name.
        name: String,
    },
    /// The device is bound, but for queues that are not spoken here.
    OtherQueues {
        /// The driver's `device_type`.
        device_type: u32,
    },
    /// The driver is bound and there is no node.
    NoNode {
        /// Where it would be.
        node: Option<PathBuf>,
    },
    /// The node may not be opened.
    NoAccess {
        /// The node.
        node: PathBuf,
        /// Group that owns it.
        owner_group: String,
        /// Whether that group would be allowed.
        group_may: bool,
        /// The groups of the user.
        user_groups: Vec<String>,
    },
    /// A virtual machine: memory cannot be shared with the device.
    VirtualMachine,
    /// The IOMMU is off, so that memory cannot be shared with the device.
    NoIommu {
        /// Boot parameter that switches it off, where there is one.
        boot_parameter: Option<String>,
    },
    /// The firmware is too old for something.
    FirmwareTooOld {
        /// Found.
        found: FirmwareVersion,
        /// Wanted.
        wanted: FirmwareVersion,
        /// What is missing.
        missing: &'static str,
    },
    /// The firmware is known to be broken.
    FirmwareDenied {
        /// Found.
        found: FirmwareVersion,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The limit of locked memory is low: it matters where memory is lent to the device.
    LowMemlock {
        /// Limit in bytes.
        limit_bytes: u64,
        /// Documented set-up in bytes.
        wanted_bytes: u64,
    },
}

impl Finding {
    /// Whether the device cannot be used at all.
    #[must_use]
    pub fn is_blocking(&self) -> bool {
        !matches!(self, Self::FirmwareTooOld { .. } | Self::LowMemlock { .. })
    }

    /// What mends it; empty where nothing does.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::LaterPart { .. } | Self::UnknownRevision { .. } => String::new(),
            Self::NoDriver { is_module_loaded: false } => format!("sudo modprobe {MODULE}"),
            Self::NoDriver { is_module_loaded: true } => format!("see why it failed: sudo dmesg | grep {MODULE}"),
            Self::OtherDriver { name } => format!("unload {name}, then: sudo modprobe {MODULE}"),
            Self::OtherQueues { .. } => String::new(),
            Self::NoNode { .. } => format!("sudo modprobe -r {MODULE} && sudo modprobe {MODULE}"),
            Self::NoAccess { owner_group, group_may: true, .. } => {
                format!("sudo usermod -aG {owner_group} $USER, then log in again")
            }
            Self::NoAccess { node, .. } => format!("sudo chgrp render {0} && sudo chmod 660 {0}", node.display()),
            Self::VirtualMachine => "run on the machine itself".to_owned(),
            Self::NoIommu { boot_parameter: Some(parameter) } => format!("boot without `{parameter}`"),
            Self::NoIommu { boot_parameter: None } => "switch the IOMMU on in the BIOS".to_owned(),
            Self::FirmwareTooOld { .. } | Self::FirmwareDenied { .. } => {
                "update linux-firmware or AMD's driver package, then reboot".to_owned()
            }
            Self::LowMemlock { .. } => "ulimit -l unlimited (or memlock in /etc/security/limits.conf)".to_owned(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LaterPart { pci_device } => {
                write!(
                    f,
                    "PCI device {pci_device:04x} is a later NPU (AIE4) with another queue model; it is not supported"
                )
            }
            Self::UnknownRevision { pci_device, pci_revision } => {
                write!(f, "PCI device {pci_device:04x} revision {pci_revision:02x} is not a known NPU")
            }
            Self::NoDriver { is_module_loaded: true } => {
                write!(f, "the module {MODULE} is loaded but did not take the device")
            }
            Self::NoDriver { is_module_loaded: false } => write!(f, "the module {MODULE} is not loaded"),
            Self::OtherDriver { name } => write!(f, "the driver {name} is bound to the device, wanted {MODULE}"),
            Self::OtherQueues { device_type } => {
                write!(f, "the driver reports device type {device_type}, wanted 0 (kernel-mode queues)")
            }
            Self::NoNode { node: Some(node) } => write!(f, "the node {} is missing", node.display()),
            Self::NoNode { node: None } => f.write_str("the driver is bound and made no node"),
            Self::NoAccess { node, owner_group, user_groups, .. } => write!(
                f,
                "no access to {}: it belongs to group {owner_group}, the user is in {}",
                node.display(),
                if user_groups.is_empty() { "no group".to_owned() } else { user_groups.join(", ") }
            ),
            Self::VirtualMachine => f.write_str("inside a virtual machine memory cannot be shared with the NPU"),
            Self::NoIommu { .. } => f.write_str("the IOMMU is off; memory cannot be shared with the NPU (SVA)"),
            Self::FirmwareTooOld { found, wanted, missing } => {
                write!(f, "firmware {found} is too old for {missing}; wanted {wanted} or newer")
            }
            Self::FirmwareDenied { found, reason } => write!(f, "firmware {found} does not work: {reason}"),
            Self::LowMemlock { limit_bytes, wanted_bytes } => write!(
                f,
                "the limit of locked memory is {} KiB; lending memory to the NPU may need {} KiB",
                limit_bytes >> 10,
                wanted_bytes >> 10
            ),
        }
    }
}

/// Everything that speaks against using `npu`, the most fundamental first; empty where nothing does. That a device passes is
/// no proof that it runs commands.
#[must_use]
pub fn check(roots: &Roots, identity: &Identity, npu: &FoundNpu) -> Vec<Finding> {
    let FoundNpu { pci_device, pci_revision, .. } = *npu;
    let Some(silicon) = npu.silicon else {
        return vec![if is_later_part(pci_device) {
            Finding::LaterPart { pci_device }
        } else {
            Finding::UnknownRevision { pci_device, pci_revision }
        }];
    };
    let mut findings = Vec::new();
    match npu.bound_driver.as_deref() {
        Some(MODULE) => findings.extend(check_bound(roots, identity, npu)),
        Some(name) => findings.push(Finding::OtherDriver { name: name.to_owned() }),
        None => {
            let is_module_loaded = roots.sys.join("module").join(MODULE).exists();
            findings.push(Finding::NoDriver { is_module_loaded });
        }
    }
    findings.extend(check_sharing(roots, npu));
    findings.extend(npu.firmware.as_deref().and_then(|text| check_firmware(silicon, text)));
    if let Some(limit_bytes) = identity.memlock_bytes.filter(|limit| *limit < MEMLOCK_WANTED_BYTES) {
        findings.push(Finding::LowMemlock { limit_bytes, wanted_bytes: MEMLOCK_WANTED_BYTES });
    }
    findings
}

/// Queues and node of a device that the driver has taken.
fn check_bound(roots: &Roots, identity: &Identity, npu: &FoundNpu) -> Option<Finding> {
    if let Some(device_type) = npu.device_type.filter(|device_type| *device_type != 0) {
        return Some(Finding::OtherQueues { device_type });
    }
    let Some(node) = npu.node.clone() else { return Some(Finding::NoNode { node: None }) };
    let Ok(metadata) = fs::metadata(&node) else { return Some(Finding::NoNode { node: Some(node) }) };
    let read_write = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    if identity.is_self && rustix::fs::access(&node, read_write).is_ok() {
        return None;
    }
    let mode = metadata.mode();
    let is_owner = metadata.uid() == identity.user;
    let is_member = identity.groups.contains(&metadata.gid());
    let bits = match (is_owner, is_member) {
        (true, _) => mode >> 6,
        (false, true) => mode >> 3,
        (false, false) => mode,
    };
    if identity.user == 0 || bits & 0o6 == 0o6 {
        return None;
    }
    let names = group_names(&roots.etc);
    let name = |group: u32| names.get(&group).cloned().unwrap_or_else(|| group.to_string());
    Some(Finding::NoAccess {
        node,
        owner_group: name(metadata.gid()),
        group_may: mode >> 3 & 0o6 == 0o6 && !is_member,
        user_groups: identity.groups.iter().map(|group| name(*group)).collect(),
    })
}

/// Whether memory can be shared with the device.
fn check_sharing(roots: &Roots, npu: &FoundNpu) -> Option<Finding> {
    if npu.has_iommu_group {
        return None;
    }
    let cpu = fs::read_to_string(roots.proc.join("cpuinfo")).unwrap_or_default();
    let is_guest =
        cpu.lines().any(|line| line.starts_with("flags") && line.split_whitespace().any(|f| f == "hypervisor"));
    if is_guest {
        return Some(Finding::VirtualMachine);
    }
    let boot = fs::read_to_string(roots.proc.join("cmdline")).unwrap_or_default();
    let off = boot.split_whitespace().find(|word| matches!(*word, "amd_iommu=off" | "iommu=off"));
    Some(Finding::NoIommu { boot_parameter: off.map(str::to_owned) })
}

fn check_firmware(silicon: Silicon, text: &str) -> Option<Finding> {
    let found = text.parse::<FirmwareVersion>().ok()?;
    match judge(silicon, found) {
        FirmwareVerdict::Fine => None,
        FirmwareVerdict::TooOld { wanted, missing } => Some(Finding::FirmwareTooOld { found, wanted, missing }),
        FirmwareVerdict::Denied { reason } => Some(Finding::FirmwareDenied { found, reason }),
    }
}

fn group_names(etc: &Path) -> BTreeMap<u32, String> {
    let text = fs::read_to_string(etc.join("group")).unwrap_or_default();
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some((fields.nth(1)?.parse().ok()?, name))
    };
    text.lines().filter_map(entry).collect()
}
