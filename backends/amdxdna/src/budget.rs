//! How many hardware contexts of a device this process may hold, over all open files.

use crate::context::ContextCore;
use npuhal_core::DeviceError;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

/// Contexts that are left to other processes.
const RESERVED: u32 = 1;

/// The contexts of one device that this process holds.
#[derive(Debug)]
pub(crate) struct ContextBudget {
    device: String,
    limit: u32,
    open: Mutex<Vec<Slot>>,
}

#[derive(Debug)]
struct Slot {
    number: u64,
    core: Weak<ContextCore>,
}

/// Permission to hold one context; given back when dropped.
#[derive(Debug)]
pub(crate) struct ContextLease {
    budget: Arc<ContextBudget>,
    number: u64,
}

impl ContextBudget {
    /// The budget of the device with address `key`, which has `hardware_limit` contexts. One budget a device and process.
    pub(crate) fn of_device(key: &str, hardware_limit: u32) -> Arc<Self> {
        static BUDGETS: LazyLock<Mutex<HashMap<String, Weak<ContextBudget>>>> = LazyLock::new(Mutex::default);
        let mut budgets = BUDGETS.lock().unwrap_or_else(PoisonError::into_inner);
        budgets.retain(|_, budget| budget.strong_count() > 0);
        if let Some(budget) = budgets.get(key).and_then(Weak::upgrade) {
            return budget;
        }
        let limit = hardware_limit.saturating_sub(RESERVED).max(1);
        let budget = Arc::new(Self { device: key.to_owned(), limit, open: Mutex::default() });
        budgets.insert(key.to_owned(), Arc::downgrade(&budget));
        budget
    }

    /// Takes a lease.
    pub(crate) fn lease(self: &Arc<Self>) -> Result<ContextLease, DeviceError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = u32::try_from(open.len()).unwrap_or(u32::MAX);
        if count >= self.limit {
            return Err(DeviceError::ContextLimit { device: self.device.clone(), open: count, limit: self.limit });
        }
        let number = open.iter().map(|slot| slot.number + 1).max().unwrap_or(0);
        open.push(Slot { number, core: Weak::new() });
        Ok(ContextLease { budget: Arc::clone(self), number })
    }
}

impl ContextLease {
    /// Says which context the lease is for.
    pub(crate) fn attach(&self, core: &Arc<ContextCore>) {
        let mut open = self.budget.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = open.iter_mut().find(|slot| slot.number == self.number) {
            slot.core = Arc::downgrade(core);
        }
    }

    /// The other contexts of the device that this process holds.
    pub(crate) fn others(&self) -> Vec<Arc<ContextCore>> {
        let open = self.budget.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|slot| slot.number != self.number).filter_map(|slot| slot.core.upgrade()).collect()
    }
}

impl Drop for ContextLease {
    fn drop(&mut self) {
        self.budget.open.lock().unwrap_or_else(PoisonError::into_inner).retain(|slot| slot.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::ContextBudget;
    use npuhal_core::DeviceError;

    #[test]
    fn leases_stop_below_the_hardware_limit_and_come_back() {
        let budget = ContextBudget::of_device("budget test", 6);
        let same = ContextBudget::of_device("budget test", 6);
        let mut leases: Vec<_> = (0..5).map(|_| budget.lease().unwrap()).collect();
        assert!(matches!(same.lease(), Err(DeviceError::ContextLimit { open: 5, limit: 5, .. })));
        leases.remove(2);
        leases.push(same.lease().unwrap());
        assert!(budget.lease().is_err());
        drop(leases);
        assert!(budget.lease().is_ok());
        assert!(ContextBudget::of_device("another device", 1).lease().is_ok());
    }
}
